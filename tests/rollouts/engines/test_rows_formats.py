"""Rows of experts as engines write them: any width, no copy, and what is refused."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from routed_rows_testing import EXPERTS, LAYERS, SETTINGS, WIDTH, experts_of
from stub_engine import npy

from hpcrl.rollouts.engines.rows import read_rows
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsRows


def test_rows_are_read_without_a_copy() -> None:
    rows = experts_of([3, 1, 4])
    payload = base64.b64decode(npy(rows))
    read = read_rows(payload)
    assert (read == rows).all()
    assert np.shares_memory(read, np.frombuffer(payload, np.uint8))


@pytest.mark.parametrize(
    "payload",
    [
        b"no file of numpy",
        base64.b64decode(npy(np.zeros((2, 3), np.uint8))),
        base64.b64decode(npy(np.zeros((2, 3, 4), np.float32))),
        base64.b64decode(npy(np.asfortranarray(np.zeros((2, 3, 4), np.uint8)))),
        base64.b64decode(npy(np.zeros((2, 3, 4), np.uint8)))[:-1],
    ],
)
def test_other_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_rows(payload)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_rows_of_any_width_become_as_narrow_as_the_model_allows(dtype: type[np.integer[Any]]) -> None:
    """Versions of engines count in other widths; what says nothing about experts is not looked at."""
    rows, given = RoutedExpertsRows(SETTINGS), experts_of([4, 5, 6])
    rows.add(3, given.astype(dtype))
    routes = rows.aligned(4)
    assert routes is not None
    assert routes.experts.dtype == np.uint8
    assert (routes.experts[:3] == given).all()
    assert routes.known.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        # layers with experts alone, slots of a padded batch, another number of experts a token
        (np.zeros((2, LAYERS - 1, WIDTH), np.uint8), "routed experts are of 2x2 .*, the model has 3x2"),
        (np.zeros((2, LAYERS, WIDTH + 1), np.int16), "routed experts are of 3x3 "),
        (np.zeros((2, WIDTH, LAYERS), np.uint8), "routed experts are of 2x3 "),
        # places of experts that are there twice, and marks of padding
        (np.full((2, LAYERS, WIDTH), EXPERTS, np.uint8), "expert 8 is not one of the model's 8"),
        (np.full((2, LAYERS, WIDTH), -1, np.int16), "expert -1 is not one of the model's 8"),
        (np.full((2, LAYERS, WIDTH), 256, np.int16), "expert 256 is not one of the model's 8"),
    ],
)
def test_rows_of_another_layout_are_refused(rows: NDArray[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutedExpertsRows(SETTINGS).add(2, rows)

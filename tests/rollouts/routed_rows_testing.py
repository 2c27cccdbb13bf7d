"""Experts of tokens as tests of several rooms make them, of a model of three layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hpcrl.dock.routes import RoutedExperts
from hpcrl.models.arch import Qwen3MoeArch
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsRows, RoutedExpertsSettings

LAYERS, WIDTH, EXPERTS = 3, 2, 8
USER = ({"role": "user", "content": "1+1"},)
TOOL = ({"role": "tool", "content": "2"},)
SETTINGS = RoutedExpertsSettings(LAYERS, WIDTH, EXPERTS)
POOLED = replace(SETTINGS, gaps=True)
ARCH = Qwen3MoeArch(
    vocab_size=103,
    hidden_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=24,
    num_experts=EXPERTS,
    num_experts_per_tok=WIDTH,
    max_position_embeddings=256,
)


def experts_of(token_ids: list[int], *, shift: int = 0) -> NDArray[np.uint8]:
    """Experts of a token that depend on the token and its place: a row that slips to a neighbour is seen."""
    tokens, places = np.asarray(token_ids)[:, None, None], np.arange(len(token_ids))[:, None, None]
    layers, picks = np.arange(LAYERS)[None, :, None], np.arange(WIDTH)[None, None, :]
    return ((tokens * 5 + places * 3 + layers + picks + shift) % EXPERTS).astype(np.uint8)


def rows_from(store: KnownRows, tokens: list[int], *, fetched: int = 0, salt: int = 3, shift: int = 0) -> RoutedExperts:
    """Of a rollout with an opening and three tokens behind it, of whose opening some came from a pool."""
    given = experts_of([*tokens, 40, 41], shift=shift)
    given[:fetched] = 0
    rows = RoutedExpertsRows(POOLED, store)
    rows.add(len(given), given, opening=(salt, tokens))
    routes = rows.aligned(len(given) + 1)
    assert routes is not None
    return routes

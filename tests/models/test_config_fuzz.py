"""Damaged and strange config.json files: an architecture that transformers reads alike, or a refusal in words."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import time
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from test_defaults import CLASS_OF, small

from hpcrl.models.arch import ARCHS, ModelArch, load_arch
from hpcrl.models.families import FAMILIES
from hpcrl.models.known import find_config, known_models, load_facts
from hpcrl.models.unread import unread_keys, unread_note

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

TRAINED = sorted(kind for arch in ARCHS for kind in arch.MODEL_TYPES)
#: fields that mean another thing, are spelled in other words, or that a family does not compute with
NOT_COMPARED = {
    *("model_type", "bos_token_id", "eos_token_id", "pad_token_id", "layers_block_type", "mtp_layers_block_type"),
    *(
        "num_nextn_predict_layers",
        "rope_scaling",
        "num_hidden_layers",
        "num_key_value_heads",
        "head_dim",
        "layer_types",
    ),
}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 7, -1, 2.5, 1e-9, 10**30, 1e308, math.nan, math.inf, -math.inf, "", "silu", "7"),
    *([], [1], [None], ["full_attention"] * 4, [[[]]], {}, {"a": 1}, {"rope_type": "yarn"}, {"type": None}, "\x1b[2J"),
)
GROUPS: tuple[Any, ...] = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"full_attention": {"rope_type": "default"}},
)
ADDED = ("rope_scaling", "rope_parameters", "quantization_config", "text_config", "layer_types", "mlp_layer_types")


def start(draw: random.Random) -> dict[str, Any]:
    """A small config of a family that is trained, or a published one of any family."""
    if draw.random() < 0.9:
        kind = draw.choice(TRAINED)
        return small(CLASS_OF.get(kind, kind)) | {"model_type": kind}
    found: dict[str, Any] = json.loads(find_config(draw.choice(known_models())).read_text())
    return found


def damage(draw: random.Random, config: dict[str, Any]) -> None:
    """Change one place: a key is lost, null, of another type, nested, huge or new."""
    place = config
    inner = [value for value in config.values() if isinstance(value, dict) and value]
    if inner and draw.random() < 0.3:
        place = draw.choice(inner)
    key = draw.choice([*place, *ADDED, "head_dim", "n_group", "index_topk_pattern", "mlp_only_layers", "strange"])
    match draw.randrange(4):
        case 0:
            place.pop(key, None)
        case 1:
            place[key] = copy.deepcopy(draw.choice(ODD))
        case 2:
            place[key] = copy.deepcopy(draw.choice(GROUPS))
            if draw.random() < 0.5:
                place[key][draw.choice([*place[key]])] = copy.deepcopy(draw.choice(ODD))
        case _:
            place[key] = [place.get(key)] if draw.random() < 0.5 else {"value": place.get(key)}


def alike(arch: ModelArch, config: dict[str, Any]) -> list[str]:
    """Fields that transformers' class reads as another value; nothing where it refuses the config."""
    kind = CLASS_OF.get(arch.model_type, arch.model_type)
    try:
        theirs = transformers.AutoConfig.for_model(**{**json.loads(json.dumps(config)), "model_type": kind})
    except Exception:  # noqa: BLE001 - it raises whatever it meets
        return []
    wrong = []
    for field in fields(arch):
        if field.name in NOT_COMPARED or not hasattr(theirs, field.name):
            continue
        own, other = getattr(arch, field.name), getattr(theirs, field.name)
        if (list(own) if isinstance(own, tuple) else own) != other:
            wrong.append(f"{field.name}: {own!r}, theirs {other!r}")
    return wrong


def try_one(draw: random.Random, directory: Path) -> str:
    """Damage a config and read it; ``read`` or ``refused``. Raises AssertionError where neither is right."""
    config = start(draw)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        damage(draw, config)
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    os.utime(path, ns=(time.time_ns(), draw.getrandbits(60)))
    shown = json.dumps(config)[:1_500]
    known = str(config.get("model_type")) in FAMILIES
    for key in unread_keys(config):
        assert known or isinstance(config.get("text_config"), dict), shown
        assert isinstance(key, str), shown
    assert len(unread_note(config) or "") < 3_000
    planned: Any = None
    try:
        planned = load_facts(path)
    except ValueError as error:
        assert str(path) in str(error), shown  # noqa: PT017
    except Exception as error:
        raise AssertionError(f"load_facts: {error!r} of {shown}") from error
    try:
        arch = load_arch(directory)
    except ValueError as error:
        assert str(path) in str(error), shown  # noqa: PT017
        return "refused"
    except Exception as error:
        raise AssertionError(f"load_arch: {error!r} of {shown}") from error
    assert planned is not None, f"trained and not planned: {shown}"
    if arch.num_hidden_layers <= 8:
        assert [(t.name, t.shape) for t in planned.tensors()] == [(t.name, t.shape) for t in arch.tensors()], shown
    assert not (wrong := alike(arch, config)), f"{wrong} of {shown}"
    return "read"


def run(seed: int, seconds: float, most: int, directory: Path) -> dict[str, int]:
    print(f"seed {seed}")
    draw, until = random.Random(seed), time.monotonic() + seconds
    counts = {"read": 0, "refused": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while sum(counts.values()) < most and time.monotonic() < until:
            counts[try_one(draw, directory)] += 1
    print(counts)
    return counts


def test_some_strange_configs(tmp_path: Path) -> None:
    counts = run(29, 60.0, 60, tmp_path)
    assert min(counts.values()) >= 3


@pytest.mark.campaign
def test_many_strange_configs(tmp_path: Path) -> None:
    counts = run(time.time_ns() % 2**32, 40.0, 10**9, tmp_path)
    assert min(counts.values()) >= 20

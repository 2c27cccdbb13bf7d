"""Our models beside those of transformers: the same weights, several sequences packed in one batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.checkpoint_io.load import load_model_dir
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import HfAdapter, model_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import load_arch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (5, 1, 12, 9)
VOCAB = 103
#: float32; sums in another order (padded attention, grouped products of experts). Values are of the order 1
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def save_model(
    path: Path, config: dict[str, Any], seed: int = 0, spread: Mapping[str, float] | None = None
) -> PreTrainedModel:
    """A model of transformers with random weights of some size, saved as users publish theirs.

    ``spread`` has the standard deviation of those whose names have a certain end.
    """
    # a second, which every rank of a test that imports this module would take
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    kind = config.pop("model_type")
    # a default of transformers may be a token that so small a vocabulary does not have
    config.setdefault("eos_token_id", 2)
    made = AutoConfig.for_model(kind, vocab_size=VOCAB, attn_implementation="eager", **config)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            # biases of routers decide, so they must differ; norms must not be ones, or zeros where these are added to 1
            centre = 1.0 if tensor.dim() == 1 and "bias" not in name and tensor.any() else 0.0
            std = next((own for end, own in (spread or {}).items() if name.endswith(end)), 0.15)
            tensor.normal_(centre, std, generator=generator)
    model.save_pretrained(path)
    return model.train()


def token_ids(seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


def load_ours(path: Path) -> Decoder:
    model = build_model(load_arch(path), device="cpu")
    load_model_dir(model, model.adapter, path)
    return model


def packed_logits(model: Decoder, sequences: list[torch.Tensor]) -> torch.Tensor:
    """``[tokens, vocab]`` of all sequences in one forward pass."""
    starts = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0)
    logits: torch.Tensor = model(torch.cat(sequences), PackedAttention(starts).context())
    return logits


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """A number that every logit moves in its own way."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    return (logits.log_softmax(-1) * weights).sum() / len(logits)


def published_gradients(model: Decoder) -> dict[str, torch.Tensor]:
    adapter: HfAdapter = model.adapter
    return {
        name: gradient
        for own, tensor in model_tensors(model).items()
        if tensor.requires_grad
        for name, gradient in adapter.to_hf(own, tensor.grad if tensor.grad is not None else torch.zeros_like(tensor))
    }


def reference_gradients(model: PreTrainedModel, path: Path) -> dict[str, torch.Tensor]:
    """By published names: gradients take the place of weights, which transformers saves."""
    for parameter in model.parameters():
        parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    model.save_pretrained(path)
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_agreement(tmp_path: Path, config: dict[str, Any], spread: Mapping[str, float] | None = None) -> Decoder:
    """Logits and every gradient are equal; returns our model. ``spread`` as in `save_model`."""
    theirs = save_model(tmp_path / "model", dict(config), spread=spread)
    ours = load_ours(tmp_path / "model")
    sequences = token_ids()
    expected = torch.cat([theirs(input_ids=s[None]).logits[0] for s in sequences])
    logits = packed_logits(ours, sequences)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    loss_of(logits).backward()
    loss_of(expected).backward()
    gradients = published_gradients(ours)
    reference = reference_gradients(theirs, tmp_path / "gradients")
    trained = {name for name in reference if not name.endswith("e_score_correction_bias")}
    assert gradients.keys() == trained
    for name in trained:
        torch.testing.assert_close(gradients[name], reference[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
    # an indexer chooses, and no gradient goes through a choice
    reached = {name: bool(g.abs().max() > 1e-4) for name, g in gradients.items() if ".indexer." not in name}
    assert sum(reached.values()) > 0.8 * len(reached)
    return ours


def write_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))

"""Nemotron-H: one module a layer, of Mamba-2, attention, dense blocks and experts."""

from __future__ import annotations

from hpcrl.models.facts import ModelFacts, Naming
from hpcrl.models.families.common import Config, common, gqa, norms
from hpcrl.models.layers import DenseMlp, Gqa, Layer, Mamba2, Mlp, Moe
from hpcrl.models.tensors import Part, Weight

_BLOCKS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_BLOCK_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def block_types(config: Config, listed: str, pattern: str) -> list[str]:
    """Return ``mamba``, ``attention``, ``moe`` or ``mlp`` for each layer, from a list or a pattern of letters.

    Raises
    ------
    ValueError
        The config has neither, or there is a kind that is not known.
    """
    given = config.get(listed) or config.get("layer_types" if listed == "layers_block_type" else "")
    if given is None:
        if not isinstance(config.get(pattern), str):
            raise ValueError(f"config.json lacks {listed}, and {pattern} is {config.get(pattern)!r}, not text")
        letters = str(config[pattern])
        if unknown := set(letters) - _BLOCKS.keys():
            raise ValueError(f"{pattern} has {min(unknown)!r}; known are {' '.join(_BLOCKS)}")
        given = [_BLOCKS[letter] for letter in letters]
    if not isinstance(given, list | tuple) or not given or not all(isinstance(kind, str) for kind in given):
        raise ValueError(f"{listed} is {given!r}, not a list of words")
    kinds = [_BLOCK_NAMES[kind] if kind in _BLOCK_NAMES else str(kind) for kind in given]
    if other := set(kinds) - set(_BLOCKS.values()):
        raise ValueError(f"{listed} has {min(other)!r}; known are mamba, attention, mlp and moe")
    return kinds


def _nemotron_layer(config: Config, kind: str, extra: tuple[Weight, ...] = ()) -> Layer:
    mixer, mlp = _nemotron_modules(config, kind)
    norm = norms(config["hidden_size"], "norm")
    return Layer(mixer=mixer, mlp=mlp, mixer_prefix="mixer.", mlp_prefix="mixer.", extra=(*extra, *norm))


def _nemotron_modules(config: Config, kind: str) -> tuple[Gqa | Mamba2 | None, Mlp | None]:
    d = config["hidden_size"]
    if kind == "mamba":
        mamba = Mamba2(
            hidden_size=d,
            num_heads=config["mamba_num_heads"],
            head_dim=config["mamba_head_dim"],
            n_groups=config.get("n_groups") or config["mamba_n_groups"],
            state_size=config["ssm_state_size"],
            conv_kernel=config["conv_kernel"],
            chunk_size=config.get("chunk_size", 128),
            conv_bias=bool(config.get("use_conv_bias", True)),
            proj_bias=bool(config.get("use_bias", False)),
        )
        return mamba, None
    if kind == "attention":
        return gqa({**config, "attention_bias": False}, rotary=False), None
    if kind == "mlp":
        bias = bool(config.get("mlp_bias", False))
        return None, DenseMlp(hidden_size=d, intermediate_size=config["intermediate_size"], gated=False, bias=bias)
    return None, Moe(
        hidden_size=d,
        num_experts=config["n_routed_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"],
        shared_intermediate_size=config["moe_shared_expert_intermediate_size"] * config.get("n_shared_experts", 1),
        gated=False,
        correction_bias=True,
        latent_size=config.get("moe_latent_size"),
    )


def nemotron_h(config: Config, name: str) -> ModelFacts:
    """Return the facts of Nemotron 3 Nano and Super."""
    kinds = block_types(config, "layers_block_type", "hybrid_override_pattern")
    naming = Naming("backbone.embeddings.weight", "backbone.norm_f.weight", "backbone.layers", "mtp.layers")
    layers = tuple(_nemotron_layer(config, kind) for kind in kinds)
    mtp: list[Layer] = []
    if config.get("num_nextn_predict_layers"):
        d = config["hidden_size"]
        ends = block_types(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
        first = (
            *(Weight(f"{norm}.weight", (d,), Part.MTP) for norm in ("enorm", "hnorm")),
            Weight("eh_proj.weight", (d, 2 * d), Part.MTP),
        )
        last = (Weight("final_layernorm.weight", (d,), Part.MTP),)
        for i, kind in enumerate(ends):
            extra = (*(first if i == 0 else ()), *(last if i == len(ends) - 1 else ()))
            mtp.append(_nemotron_layer(config, kind, extra))
    return ModelFacts(**common(config, name), layers=layers, mtp_layers=tuple(mtp), naming=naming)

"""Feed-forward blocks: dense ones, and routed experts with shared ones."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.models.layers.common import linear
from hpcrl.models.tensors import Part, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlp:
    """A feed-forward block for every token; ``gated``: SwiGLU's three matrices, else two."""

    hidden_size: int
    intermediate_size: int
    gated: bool = True
    part: Part = Part.DENSE_MLP
    prefix: str = ""
    bias: bool = False

    @property
    def weights(self) -> tuple[Weight, ...]:
        d, f = self.hidden_size, self.intermediate_size
        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        return (
            *(w for name in names for w in linear(self.prefix + name, f, d, self.part, tp=0, bias=self.bias)),
            *linear(f"{self.prefix}down_proj", d, f, self.part, tp=1, bias=self.bias),
        )

    @property
    def flops(self) -> int:
        """Return the FLOPs: ``2 · weights`` a token."""
        return 2 * sum(w.elements for w in self.weights if len(w.shape) == 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names and layout of the tensors of a family's sparse layers.

    Attributes
    ----------
    router:
        Name of the router's matrix, without ``.weight``.
    correction_bias:
        Name of the router's bias that affects only the choice.
    gate, up, down:
        Names of an expert's matrices.
    fused:
        Whether all experts of a layer are one tensor each for ``gate_up_proj`` and ``down_proj``,
        ``[experts, in, out]``.
    """

    router: str = "gate"
    correction_bias: str = "gate.e_score_correction_bias"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts, and shared ones that every token visits."""

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0
    """Width of all shared experts together; 0: none."""
    shared_prefix: str = "shared_experts."
    shared_gate: bool = False
    """The output of the shared expert is scaled by a number from each token (``shared_expert_gate``)."""
    gated: bool = True
    bias: bool = False
    """Whether the router and the matrices of routed experts have a bias."""
    correction_bias: bool = False
    """The router has a bias that only chooses (``e_score_correction_bias``)."""
    correction_bias_dtype: str | None = "float32"
    latent_size: int | None = None
    """Experts work in a space of this width (Nemotron 3 Super); None: ``hidden_size``."""
    names: ExpertNames = ExpertNames()

    @property
    def expert_width(self) -> int:
        """Return the width of an expert's input and output."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def expert_weights(self) -> tuple[Weight, ...]:
        """Return the weights of the routed experts; names have ``{}`` for the expert where each has its own tensors."""
        if self.names.fused:
            return self._fused_weights()
        d, f, n, part = self.expert_width, self.moe_intermediate_size, self.num_experts, Part.EXPERT
        names = (self.names.gate, self.names.up) if self.gated else (self.names.up,)
        return (
            *(Weight(f"experts.{{}}.{x}.weight", (f, d), part, tp_dim=0, quantised=True, copies=n) for x in names),
            Weight(f"experts.{{}}.{self.names.down}.weight", (d, f), part, tp_dim=1, quantised=True, copies=n),
        )

    def _fused_weights(self) -> tuple[Weight, ...]:
        d, f, n, part = self.expert_width, self.moe_intermediate_size, self.num_experts, Part.EXPERT
        biases = (
            Weight("experts.gate_up_proj_bias", (n, 2 * f), part, tp_dim=1),
            Weight("experts.down_proj_bias", (n, d), part),
        )
        return (
            Weight("experts.gate_up_proj", (n, d, 2 * f), part, tp_dim=2, quantised=True),
            Weight("experts.down_proj", (n, f, d), part, tp_dim=1, quantised=True),
            *(biases if self.bias else ()),
        )

    @property
    def expert_parameters(self) -> int:
        """Return the number of parameters of one routed expert."""
        return sum(w.elements for w in self.expert_weights) // self.num_experts

    @property
    def shared(self) -> DenseMlp | None:
        """Return the shared experts as one block."""
        if not self.shared_intermediate_size:
            return None
        return DenseMlp(
            hidden_size=self.hidden_size,
            intermediate_size=self.shared_intermediate_size,
            gated=self.gated,
            part=Part.SHARED_EXPERT,
            prefix=self.shared_prefix,
        )

    @property
    def weights(self) -> tuple[Weight, ...]:
        d, part = self.hidden_size, Part.ROUTER
        chooses = Weight(
            self.names.correction_bias, (self.num_experts,), part, dtype=self.correction_bias_dtype, trained=False
        )
        latent: tuple[Weight, ...] = ()
        if self.latent_size is not None:
            latent = (
                *linear("fc1_latent_proj", self.latent_size, d, Part.SHARED_EXPERT, tp=None),
                *linear("fc2_latent_proj", d, self.latent_size, Part.SHARED_EXPERT, tp=None),
            )
        return (
            Weight(f"{self.names.router}.weight", (self.num_experts, d), part),
            *((Weight(f"{self.names.router}.bias", (self.num_experts,), part),) if self.bias else ()),
            *((chooses,) if self.correction_bias else ()),
            *self.expert_weights,
            *(() if self.shared is None else self.shared.weights),
            *((Weight("shared_expert_gate.weight", (1, d), Part.SHARED_EXPERT),) if self.shared_gate else ()),
            *latent,
        )

    @property
    def router_flops(self) -> int:
        """Return the FLOPs of the router: ``2 · hidden · experts`` a token."""
        return 2 * self.hidden_size * self.num_experts

    @property
    def expert_flops(self) -> int:
        """Return the FLOPs of the matrices of the chosen experts: ``2 · weights`` a token."""
        matrices = sum(w.elements for w in self.expert_weights if not w.name.endswith("_bias")) // self.num_experts
        return 2 * self.num_experts_per_tok * matrices

    @property
    def shared_flops(self) -> int:
        """Return the FLOPs of the shared experts, and of the projections to and from the latent space.

        They are ``2 · weights`` a token.
        """
        own = 0 if self.shared is None else self.shared.flops + 2 * self.hidden_size * self.shared_gate
        return own + (0 if self.latent_size is None else 4 * self.hidden_size * self.latent_size)

"""Memory that the sandboxes of a node may need together.

``memory_gib`` of a sandbox is a limit and no reservation, so the sum of all limits is shown and not counted. All
sandboxes of a node together are limited to what the plan leaves (`hpcrl.sandboxes.node_memory`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.config.sandbox_use import SandboxNode, SandboxUse, sandbox_node, sandbox_uses
from hpcrl.models.facts import ModelFacts
from hpcrl.planning.ledger import GIB, Term
from hpcrl.planning.routes import max_rollouts_in_flight


@dataclass(frozen=True, slots=True)
class OpenSandboxes:
    """Maximum number of sandboxes of one kind on a node.

    Attributes
    ----------
    use:
        Limits of one of them.
    count:
        Their maximum number at once.
    """

    use: SandboxUse
    count: int


@dataclass(frozen=True, slots=True)
class SandboxMemory:
    """Sandboxes of the node that has the most of them.

    Attributes
    ----------
    node:
        The node.
    kinds:
        The sandboxes that need the most memory, of those that may be open at once.
    left:
        Bytes that the terms of the roles on the node leave; None where the profile does not say.
    alone:
        The terms of the roles are not known, and ``left`` is the memory of the node.
    given_gib:
        The recipe's own limit of all sandboxes of the node (``rollouts.sandboxes_gib``).
    """

    node: SandboxNode
    kinds: tuple[OpenSandboxes, ...]
    left: int | None
    alone: bool = False
    given_gib: float | None = None

    @property
    def limit(self) -> int | None:
        """Return the bytes that all sandboxes of the node, or of a worker with memory of its own, may use together.

        By default that is what roles leave, and at least the limit of one sandbox. None: the plan does not know.
        """
        if self.given_gib is not None:
            return round(self.given_gib * GIB) // self.node.parts
        one = max(round(kind.use.memory_gib * GIB) for kind in self.kinds)
        return None if self.left is None else max(self.left // self.node.parts, one)

    @property
    def count(self) -> int:
        """Return the maximum number of sandboxes that are open at once."""
        return sum(kind.count for kind in self.kinds)

    @property
    def term(self) -> Term:
        """Return the sum of the limits of all sandboxes; it is shown and not counted."""
        parts = [(kind.count, kind.use) for kind in self.kinds]
        value = sum(count * round(use.memory_gib * GIB) for count, use in parts)
        inputs: dict[str, float | str] = {f"sandboxes of {use.label}": count for count, use in parts}
        inputs |= {f"memory_gib of {use.label}": use.memory_gib for _, use in parts}
        return Term("sandboxes", value, "Σ sandboxes · memory_gib", inputs, "limit", counts=False)

    @property
    def fits(self) -> bool:
        """Return whether all sandboxes may use their limits at once, as far as is known."""
        return self.left is None or self.term.value <= self.left

    @property
    def warning(self) -> str:
        """Return what happens where they need more memory than there is, and what to change; empty where they fit."""
        if self.fits or self.left is None:
            return ""
        each = ", ".join(f"{kind.count:,} of {kind.use.label} x {kind.use.memory_gib:g}" for kind in self.kinds)
        left = max(0, self.left) / GIB
        has = f"which has {left:,.1f} GiB" if self.alone else f"where other roles leave {left:,.1f} GiB"
        part = "of one worker" if self.node.parts > 1 else "together"
        return (
            f"sandboxes may need {self.term.value / GIB:,.1f} GiB at once ({each} GiB) on {self.node.text}, {has} "
            f"({left / self.count:.2g} GiB a sandbox). Where all {part} use more than {(self.limit or 0) / GIB:,.1f} "
            f"GiB, the largest ends, and its rollout has no reward. {self._remedy()}"
        )

    def _remedy(self) -> str:
        """Return the keys to change in a sentence, with the largest value that always fits where one key is enough."""
        workers = "environment_workers.count" if self.node.role is Role.ENV else "environment_workers (own nodes)"
        (kind, *others), left = self.kinds, self.left or 0
        most = left // (self.node.processes * round(kind.use.memory_gib * GIB))
        if not others and kind.use.limit and most:
            key = f"{kind.use.section}.{kind.use.limit}"
            return f"All fit with {key}={most}; or lower {kind.use.section}.memory_gib, or set {workers}"
        keys = [f"{each.use.section}.{each.use.limit or 'memory_gib'}" for each in self.kinds]
        return f"Lower {' and '.join(keys)}, or set {workers}"


def open_sandboxes(
    recipe: Recipe, cluster: ClusterProfile, facts: ModelFacts | None, left: int | None, *, alone: bool = False
) -> SandboxMemory | None:
    """Return the sandboxes of the fullest node; None for a recipe without sandboxes whose limits it tells.

    A rollout has one sandbox at a time. In flight are rollouts of training, and those of an evaluation as well.

    Parameters
    ----------
    facts:
        Facts of the model, whose routed experts may limit the rollouts in flight; None where they are not known.
    left, alone:
        See `SandboxMemory`.
    """
    node = sandbox_node(recipe, cluster)
    rollouts = recipe.rollouts.max_in_flight if facts is None else max_rollouts_in_flight(recipe, facts)[0]
    evaluated = [recipe.evaluation.prompts, *(each.prompts * each.samples for each in recipe.evaluation.sets)]
    rollouts += min(recipe.rollouts.max_in_flight, sum(evaluated))
    # workers have equal shares of the rollouts
    free = -(-rollouts * node.processes // node.of)
    kinds = []
    for use in sorted(sandbox_uses(recipe), key=lambda each: -each.memory_gib):
        count = free if use.at_once is None else min(free, use.at_once * node.processes)
        free -= count
        if count:
            kinds.append(OpenSandboxes(use, count))
    return SandboxMemory(node, tuple(kinds), left, alone, recipe.rollouts.sandboxes_gib) if kinds else None

"""Gradients that are not finite: which parameters, which rollouts, and whether the step is skipped or the run ends.

A token's gradient at the embedding, or at the output of a layer, depends on tokens of its own rollout alone, on any
mesh: attention does not cross rollouts, and experts work row by row. So where that gradient is not finite, the rollout
is the cause, and a check in the backward pass that runs anyway finds the rollout without a second one. The
backward pass goes down to the first output that needs a gradient: that of the embedding, or of a layer if the
embedding is frozen, as with adapters. If it does not cover all tokens, only non-finite inputs of the batch are
reported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from hpcrl.config.trainer import NonFiniteConfig
from hpcrl.dock.wire import BatchShard, MicroBatch
from hpcrl.errors import HpcrlError, RunFailedError
from hpcrl.modeling.blocks import local_part
from hpcrl.modeling.decoder import Decoder
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.sealed_files import SealedFileError
from hpcrl.trainer.parallel.ranks import Ranks

_log = logging.getLogger(__name__)

_NAMED = 5
"""Maximum number of parameters or rollouts that are named; others are counted."""
_OWN_PASS = "in the trainer's own pass"
"""Reason for a rollout whose gradient is not finite although its inputs are."""
_ENGINE = "the engine's log-probability"
_ADVANTAGE = "its advantage is not finite"


@dataclass(frozen=True)
class _Found:
    """Findings of a step, or of one rank. Every list is in the order of the model or of the batch.

    Attributes
    ----------
    gradients:
        Parameters whose gradient is not finite.
    weights:
        Parameters that are not finite themselves.
    rollouts:
        Rollouts that caused it, with the reason.
    saw_all:
        Whether the gradient of every token was checked below all layers, so that no other rollout can be the cause.
    tokens:
        Trained tokens of all ranks whose log-probabilities are not finite, the engine's or the trainer's own.
    """

    gradients: list[str]
    weights: list[str]
    rollouts: list[str]
    saw_all: bool
    tokens: int = 0

    def blames(self, reason: str) -> bool:
        """Return whether a rollout is to blame for this reason."""
        return any(reason in each for each in self.rollouts)


class NonFiniteGradientError(HpcrlError):
    """The gradient of a step is not finite. The weights and the state of the optimizer are as before.

    Attributes
    ----------
    found:
        Parameters and rollouts, the same on all ranks.
    """

    def __init__(self, step: int, norm: float, found: _Found) -> None:
        self.step, self.norm, self.found = step, norm, found
        super().__init__(f"{self.what}\n    hint: {self._hint}")

    @property
    def what(self) -> str:
        """Return one line for each kind of cause."""
        lines = [f"the gradient norm of step {self.step} is {self.norm}; the weights were left as they are"]
        if self.found.weights:
            lines.append(f"    weights that are not finite: {_some(self.found.weights)}")
        lines.append(f"    it began with: {self._began_with}")
        lines.append(f"    gradients that are not finite: {_some(self.found.gradients)}")
        lines.append(f"    rollouts: {self._blamed}")
        return "\n".join(lines)

    @property
    def _began_with(self) -> str:
        """Return which values were not finite before the gradients, or that all others were finite."""
        found = self.found
        kinds = []
        if found.blames(_ADVANTAGE):
            kinds.append("advantages, which are made of the environment's rewards")
        if found.blames(_ENGINE):
            kinds.append("log-probabilities that the engine gave")
        elif found.tokens:
            kinds.append(f"log-probabilities of {found.tokens} tokens in the trainer's own forward pass")
        return "; ".join(kinds) or "gradients: rewards and log-probabilities are finite"

    @property
    def _blamed(self) -> str:
        if self.found.rollouts:
            return _some(self.found.rollouts, "; ")
        if self.found.saw_all:
            return "none alone; their sum is too large"
        return "unknown; the backward pass does not reach the embeddings, which are frozen"

    @property
    def _hint(self) -> str:
        if self.found.weights:
            return "resume from a checkpoint before the weights were lost (hpcrl resume RUN --from-step N)"
        if self.found.rollouts and not self.found.blames(_OWN_PASS):
            hints = []
            if self.found.blames(_ADVANTAGE):
                hints.append("check the rewards of these rollouts (hpcrl rollouts show RUN GROUP/MEMBER)")
            if self.found.blames(_ENGINE):
                hints.append("check the engine's log")
            return "; ".join([*hints, "trainer.nonfinite.action: skip skips such a step"])
        if not self.found.rollouts and not self.found.saw_all:
            return (
                "check grad_norm of earlier steps: if it grew, use a lower trainer.optimizer.learning_rate, then "
                "resume from the last checkpoint; trainer.nonfinite.action: skip skips such a step"
            )
        return (
            "a lower trainer.optimizer.learning_rate, then resume from the last checkpoint; "
            "trainer.nonfinite.action: skip skips such a step"
        )


class _Noted(NamedTuple):
    """Findings of one backward pass on the device: tokens whose gradient is not finite, and their rollouts.

    ``saw_all``: the gradient is that of the embedding, below all layers.
    """

    bad: Tensor
    sequences: Tensor
    saw_all: bool


class GradientWatch:
    """Notes, without waiting for the device, which tokens of each micro-batch have a gradient that is not finite."""

    def __init__(self, model: Decoder) -> None:
        """Watch the first output of the embedding, the layers and the last norm of ``model`` that needs a gradient."""
        self._shard: BatchShard | None = None
        self._noted: list[_Noted | None] = []
        self._sequences: Tensor | None = None
        self._embedding = model.embed_tokens
        for module in (model.embed_tokens, *model.layers, model.norm):
            module.register_forward_hook(self._look)

    def begin_step(self, shard: BatchShard) -> None:
        """Begin a step, whose micro-batches are those of ``shard`` in their order."""
        self._shard, self._noted = shard, []

    def end_step(self) -> None:
        """Forget the step after it had no problem."""
        self._shard, self._noted = None, []

    def begin(self, sequences: Tensor) -> None:
        """Begin a forward pass over tokens of the rollouts ``sequences [T]``.

        ``sequences`` are indices in the micro-batch, or padding.
        """
        self._sequences = sequences
        self._noted.append(None)

    def _look(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self._sequences is None or not output.requires_grad:
            return
        at, sequences = len(self._noted) - 1, self._sequences
        self._sequences = None

        def note(gradient: Tensor) -> None:
            self._noted[at] = _Noted(~gradient.isfinite().all(1), sequences, module is self._embedding)

        output.register_hook(note)  # type: ignore[no-untyped-call]

    def _rollouts(self) -> tuple[list[str], bool]:
        """Return the names of this rank's rollouts that are the cause, and whether there can be no others."""
        names, saw_all = [], True
        micro_batches = [] if self._shard is None else self._shard.micro_batches
        for noted, micro_batch in zip(self._noted, micro_batches, strict=False):
            bad = set() if noted is None else set(noted.sequences[noted.bad].tolist())
            for i, (group, member) in enumerate(micro_batch.rollouts):
                # even without a check of its gradient, its inputs can be checked
                reason = _wrong_input(micro_batch, i)
                if i in bad or (noted is None and reason is not None):
                    names.append(f"group {group} member {member} ({reason or _OWN_PASS})")
            if micro_batch.rollouts:
                saw_all = saw_all and noted is not None and noted.saw_all
        return names, saw_all

    def error(
        self, model: nn.Module, step: int, norm: float, ranks: Ranks, *, nonfinite_tokens: int = 0
    ) -> NonFiniteGradientError:
        """Return the error to raise, equal on all ranks. Collective; it waits for the device.

        ``nonfinite_tokens`` counts those of all ranks, as in `hpcrl.runs.metrics.StepRecord`.
        """
        named = dict(model.named_parameters())
        gradients = {name for name, p in named.items() if p.grad is not None and _is_broken(p.grad)}
        weights = {name for name, p in named.items() if _is_broken(p.detach())}
        own = _Found(sorted(gradients), sorted(weights), *self._rollouts())
        everywhere = ranks.gather(own)
        found = _Found(
            [name for name in named if any(name in each.gradients for each in everywhere)],
            [name for name in named if any(name in each.weights for each in everywhere)],
            # ranks of a context-parallel group share rollouts
            list(dict.fromkeys(name for each in everywhere for name in each.rollouts)),
            all(each.saw_all for each in everywhere),
            nonfinite_tokens,
        )
        return NonFiniteGradientError(step, norm, found)


def _wrong_input(micro_batch: MicroBatch, rollout: int) -> str | None:
    """Return which input of a rollout is not finite; None if all of it is finite."""
    part = slice(micro_batch.cu_seqlens[rollout], micro_batch.cu_seqlens[rollout + 1])
    sampled = micro_batch.loss_mask[part] != 0
    wrong = int((~np.isfinite(micro_batch.logprobs[part][sampled])).sum())
    if wrong:
        return f"{_ENGINE} of {wrong} tokens is not finite"
    if not np.isfinite(micro_batch.advantages[part]).all():
        return _ADVANTAGE
    return None


def _is_broken(tensor: Tensor) -> bool:
    return not bool(local_part(tensor).isfinite().all())


def _some(names: list[str], between: str = ", ") -> str:
    more = len(names) - _NAMED
    return between.join(names[:_NAMED]) + (f"{between}and {more} more" if more > 0 else "")


class SkippedSteps:
    """Decides what becomes of a step whose gradient is not finite: the same on all ranks, as they know the same."""

    def __init__(self, config: NonFiniteConfig, *, in_a_row: int = 0) -> None:
        """Begin after ``in_a_row`` consecutive skipped steps."""
        self._config, self._in_a_row = config, in_a_row

    def trained(self) -> None:
        """Reset the count: a step was not skipped."""
        self._in_a_row = 0

    def skip(self, error: NonFiniteGradientError) -> int:
        """Count the step as skipped; return the number of consecutive ones.

        Raises
        ------
        RunFailedError
            The run ends instead: the recipe says so, too many were skipped in a row, or the weights are not finite, so
            that no later step could be better.
        """
        if self._config.action == "end" or error.found.weights:
            raise RunFailedError(str(error)) from error
        if self._in_a_row >= self._config.max_in_a_row:
            raise RunFailedError(
                f"{self._in_a_row} steps in a row were skipped already (trainer.nonfinite.max_in_a_row); {error}"
            ) from error
        self._in_a_row += 1
        return self._in_a_row


def skipped_before(run: RunDir, step: int) -> int:
    """Return `skipped_in_a_row` of a run's records; 0, with a warning, where a file of them is damaged.

    Records are for people: a damaged one does not keep a run from going on.
    """
    try:
        records = read_metrics(run)
    except SealedFileError as error:
        _log.warning("skipped steps are counted from 0: %s", error)
        return 0
    return skipped_in_a_row(records, step)


def skipped_in_a_row(records: Iterable[StepRecord], step: int) -> int:
    """Return how many consecutive steps up to ``step`` were skipped, from the records of a run in step order."""
    count = 0
    for record in records:
        if record.step <= step:
            count = count + 1 if record.skipped else 0
    return count

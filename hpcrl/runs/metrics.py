"""Metrics of a run, one record per optimizer step: the source of ``status``, the live table, the report and benches.

``metrics/NNNN.jsonl`` and files that continue it (`hpcrl.runs.metrics_files`) have one line a step. The line of a step
that saves a checkpoint is written before the save, so that a resume from that checkpoint finds the step on record; the
final durations of that step's phases are a line in ``metrics/saved/NNNN.jsonl``.

Records are plain values, which cannot form cycles. Python's collector of cycles therefore does not look at them
(``gc=False``): with those of a long run it would take a third of the time of reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcrl.reporting import reports
from hpcrl.reporting.reports import Outage, ReportedFile, ReportedLines
from hpcrl.runs.lenient import decode_lenient
from hpcrl.runs.metrics_files import MetricsLines, metrics_parts
from hpcrl.runs.past import Past, Start, read_past
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.token_ratios import RolloutRatios, StepRatios, ratios_path
from hpcrl.storage.sealed_files import content_bytes, content_from

_CLOSE_S = 10.0
_RATIOS_CLOSE_S = 2.0
"""Timeout in seconds of the wait for log-ratios at the end: only pages show them."""
_TAIL_BYTES = 64 << 10
_Line = TypeVar("_Line", bound=msgspec.Struct)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Measurements of one optimizer step.

    Attributes
    ----------
    time_s:
        Seconds since the epoch at the end of the step.
    attempt, step:
        ``step`` counts from 1 and equals the policy version that the step makes.
    reward_mean, reward_std:
        Over the consumed rollouts.
    reward_by_env:
        Mean by environment name.
    reward_parts:
        Mean of each named part, as ``<env>/<part>``.
    reward_count, reward_count_by_env, reward_count_by_part:
        Rollouts that these means are over; those of staleness are over ``reward_count``, too. 0 and empty in records of
        earlier versions.
    loss, entropy:
        Token means over trained tokens; entropy in nats, of the trainer's distribution.
    mismatch_kl:
        k3 estimate of KL(engine || trainer) over trained tokens: ``r - 1 - log r`` with ``r`` the
        probability ratio trainer / engine.
    mismatch_kl_by_lag:
        The same by version lag of the token (string keys): trainer version minus token version. ``mixed`` holds
        tokens whose rollout crossed a weight update before them: they were sampled by new weights on a context
        that older ones had computed, which no single version explains.
    loss_metrics:
        Token means of what a loss of the user's own measures, by name; without those that no token has.
    entropy_by_env, mismatch_kl_by_env:
        ``entropy`` and ``mismatch_kl`` over the trained tokens of one environment, by its name; empty in supervised
        runs and in records of earlier versions.
    masked_share:
        Share of trained tokens that the loss masked or cut.
    masked_low_share, masked_high_share:
        The part of it with a lower, and with a higher, probability in the trainer than in the engine; None in records
        of earlier versions. A loss that masks whole sequences may mask tokens with equal ones, which are in neither.
    ess:
        Effective sample size of the importance ratios, as a share of tokens: ``(Σr)² / (n Σr²)``.
    routing_mismatch:
        Share of pairs of token and layer whose set of experts is another one in the trainer than in the engine; over
        all tokens whose experts engines returned. None where they returned none.
    routing_mismatch_by_lag:
        The same by version lag as for ``mismatch_kl_by_lag``, over the forward passes that sampled trained tokens.
    routed_tokens:
        Tokens of the batch whose experts engines returned.
    routes_bytes:
        Size of the rows of experts that ranks fetched with the batch, in all layers, each rollout once.
    replayed_mismatch_kl, unreplayed_mismatch_kl:
        ``mismatch_kl`` of the same trained tokens with the experts of the engine and without, once every
        ``trainer.replay_probe_steps`` steps; None in others.
    replayed_share:
        Share of the batch's tokens that took the experts of the engine (``trainer.router_replay``); None where experts
        are not replayed.
    reference_kl:
        k3 estimate of KL(trainer || reference) over trained tokens, with ``algorithm.kl``; None without.
    teacher_kl:
        Mean over trained tokens of the engine's log-probability minus the teacher's, an estimate of KL(engine ||
        teacher), with ``algorithm.distillation``; None without.
    unknown_routing:
        Share of the batch's tokens whose experts no engine returned, by kind: ``last``, the last token of a rollout,
        which never went into an engine; ``sampled``, other sampled tokens; ``context``, prompts and outputs of tools.
        Empty where engines return no experts.
    rollouts_digest:
        Digest of the rollouts that ranks trained on, by `hpcrl.dock.ledger.digest`; None in records of earlier
        versions.
    staleness_mean, staleness_max:
        Trainer version minus version of the first sampled token, over rollouts.
    staleness_histogram:
        Rollouts by staleness (string keys).
    tokens, sampled_tokens:
        Tokens in the batch, and those the model sampled.
    branches_mean, branches_max:
        Sequences of a rollout, over the consumed rollouts: 1 where its history only grew.
    prefix_repeated_tokens:
        Tokens of the batch that are context in a sequence because an earlier one of the same rollout has them.
    tokens_per_s:
        ``tokens`` over the duration of the step.
    model_flops:
        Floating-point operations of a forward and a backward pass over the sequences of the batch, nothing computed
        again (`hpcrl.models.packing.training_cost`); None where the sizes of the model are unknown.
    wait_for_policy_s:
        Seconds since the batch before in which there was room for another group of rollouts, and none could begin until
        engines served a newer version; None in supervised runs and in records of earlier versions.
    grad_norm:
        Global norm before clipping; 0 where the step was skipped.
    learning_rate:
        Used in this step; 0 where it was skipped.
    skipped:
        The gradient was not finite, and the weights were left as they are (``trainer.nonfinite``).
    nonfinite_tokens:
        Trained tokens whose log-probabilities are not finite; the means of tokens are over the others.
    phases_s:
        Seconds by phase; the sum is the step: ``wait_batch``, ``forward_backward``, ``optimizer``,
        ``publish``, ``checkpoint``, ``other``.
    rollouts:
        The orchestrator's counters at the time of the batch.
    held_out_loss:
        Token mean of the cross entropy on held-out conversations after the step, in nats (supervised runs); None where
        it was not computed.
    peak_memory_gib:
        The most GPU memory that rank 0 of the trainer has allocated since its start, in GiB; None without a GPU.
    """

    time_s: float
    attempt: int
    step: int
    reward_mean: float
    reward_std: float
    reward_by_env: dict[str, float]
    reward_parts: dict[str, float]
    loss: float
    entropy: float
    mismatch_kl: float
    mismatch_kl_by_lag: dict[str, float]
    masked_share: float
    ess: float
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[str, int]
    tokens: int
    sampled_tokens: int
    tokens_per_s: float
    grad_norm: float
    learning_rate: float
    phases_s: dict[str, float]
    rollouts: dict[str, float]
    routing_mismatch: float | None = None
    routing_mismatch_by_lag: dict[str, float] = {}
    routed_tokens: int = 0
    routes_bytes: int = 0
    replayed_mismatch_kl: float | None = None
    unreplayed_mismatch_kl: float | None = None
    replayed_share: float | None = None
    reference_kl: float | None = None
    teacher_kl: float | None = None
    unknown_routing: dict[str, float] = {}
    rollouts_digest: str | None = None
    skipped: bool = False
    nonfinite_tokens: int = 0
    held_out_loss: float | None = None
    reward_count: int = 0
    reward_count_by_env: dict[str, int] = {}
    reward_count_by_part: dict[str, int] = {}
    branches_mean: float = 1.0
    branches_max: int = 1
    prefix_repeated_tokens: int = 0
    loss_metrics: dict[str, float] = {}
    peak_memory_gib: float | None = None
    masked_low_share: float | None = None
    masked_high_share: float | None = None
    entropy_by_env: dict[str, float] = {}
    mismatch_kl_by_env: dict[str, float] = {}
    model_flops: float | None = None
    wait_for_policy_s: float | None = None


class FinalPhases(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Final phases of a step that saved a checkpoint: fields of `StepRecord` that its record has too early."""

    time_s: float
    attempt: int
    step: int
    phases_s: dict[str, float]


class MetricsWriter:
    """Appends step records of one attempt; an earlier attempt that still runs writes another file.

    It neither fails nor waits: see `hpcrl.reporting.reports`.

    Parameters
    ----------
    on_caught_up:
        Called when records could be written again after an outage.
    part_bytes:
        As for `hpcrl.runs.metrics_files.MetricsLines`.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        *,
        on_caught_up: Callable[[Outage], None] | None = None,
        part_bytes: int | None = None,
    ) -> None:
        self._lines = MetricsLines(run, attempt, on_caught_up=on_caught_up, part_bytes=part_bytes)
        self._saved = ReportedLines(_saved_dir(run) / f"{attempt:04d}.jsonl", on_caught_up=on_caught_up)
        self._run, self._attempt, self._ratios = run, attempt, dict[Path, ReportedFile]()

    def write(self, record: StepRecord) -> None:
        """Add a record."""
        self._lines.append(msgspec.json.encode(record))

    def write_final_phases(self, record: StepRecord) -> None:
        """Write the final durations of a step's phases, whose record was written before they ended."""
        final = FinalPhases(time_s=record.time_s, attempt=record.attempt, step=record.step, phases_s=record.phases_s)
        self._saved.append(msgspec.json.encode(final))

    def write_ratios(self, step: int, rollouts: list[RolloutRatios]) -> None:
        """Write the log-ratios of some rollouts of a step, in place of those of ten steps before."""
        if rollouts:
            path = ratios_path(self._run, step)
            if path not in self._ratios:
                self._ratios[path] = ReportedFile(path, durable=False)
            self._ratios[path].put(StepRatios(step, self._attempt, rollouts).encode())

    def flush(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds until all records are written; return whether they are."""
        return self._lines.flush(timeout_s) and self._saved.flush(timeout_s)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Flush (see `flush`), and close the file."""
        self.flush(timeout_s)
        if self._ratios:
            reports.flush(min(timeout_s, _RATIOS_CLOSE_S), directory=ratios_path(self._run, 0).parent)
        self._lines.close()
        self._saved.close()


def _saved_dir(run: RunDir) -> Path:
    return run.metrics_dir / "saved"


def read_metrics(run: RunDir) -> list[StepRecord]:
    """Return step records in step order. A step that a resume repeated counts once, in its last form.

    A number that is null in a record is unknown, and becomes NaN. Lines that are not records are left out.

    Records of an attempt about steps after the one that a later attempt restored do not count
    (`hpcrl.runs.past`), whenever it was written.
    """
    found = [record for path in _files(run) for record in _read_file(path, StepRecord)]
    saved = _saved_dir(run)
    finals = {
        (final.attempt, final.step): final
        for path in (sorted(saved.glob("*.jsonl")) if saved.is_dir() else ())
        for final in _read_file(path, FinalPhases)
    }
    found = [_completed(record, finals.get((record.attempt, record.step))) for record in found] if finals else found
    starts = read_past(run).starts
    firsts: dict[int, int] = {}
    for record in found:
        firsts[record.attempt] = min(record.step, firsts.get(record.attempt, record.step))
    # an attempt without a recorded decision began just before its first step
    past = Past({attempt: Start(step - 1) for attempt, step in firsts.items()} | starts)
    records: dict[int, StepRecord] = {}
    # a stable sort: within one attempt the last record of a step counts
    for record in sorted(found, key=lambda record: record.attempt):
        if past.holds(record.attempt, record.step):
            records[record.step] = record
    return [records[step] for step in sorted(records)]


def read_newest(run: RunDir) -> StepRecord | None:
    """Return the newest step record, as `read_metrics` has it; read only the end of one file where possible."""
    attempts = run.attempts()
    for path in reversed(metrics_parts(run, attempts[-1]) if attempts else []):
        for line in reversed(_tail(path).split(b"\n")):
            # None: torn, or cut by where the tail begins
            if (record := decode_lenient(line, StepRecord)) is not None:
                return record
    metrics = read_metrics(run)
    return metrics[-1] if metrics else None


def _files(run: RunDir) -> list[Path]:
    """Return the files of all attempts, after the one file of a run of an earlier version."""
    old = [run.metrics_path] if run.metrics_path.is_file() else []
    return old + metrics_parts(run)


def _tail(path: Path) -> bytes:
    return content_from(path, max(0, content_bytes(path) - _TAIL_BYTES))


def _read_file(path: Path, kind: type[_Line]) -> Iterator[_Line]:
    for line in content_from(path).split(b"\n"):
        # None: empty, or the torn last line of a writer that was killed
        if line and (record := decode_lenient(line, kind)) is not None:
            yield record


def _completed(record: StepRecord, final: FinalPhases | None) -> StepRecord:
    """Return a record with the final durations of its phases."""
    if final is None:
        return record
    seconds = max(sum(final.phases_s.values()), 1e-9)
    return msgspec.structs.replace(
        record, time_s=final.time_s, phases_s=final.phases_s, tokens_per_s=record.tokens / seconds
    )

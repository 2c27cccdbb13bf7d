"""Plots of a page about learning: rewards, losses, the mismatch of engine and trainer, staleness, gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from hpcrl.analysis.comparison.noise import wilson_interval
from hpcrl.analysis.finished_rollouts import reward_line
from hpcrl.analysis.page.material import Plot, RunMaterial
from hpcrl.analysis.series import Line, known, line_of, lines_of, smoothed
from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.run_progress import Evaluation, SetEvaluation

LEARNING, POLICY = "Learning", "Policy and gradient"
_SHARE_NOTE = (
    "Band of held-out rewards: Wilson's interval of 95 % of a mean of {count} rollouts as if rewards were 0 or 1. "
    "Rewards between 0 and 1 have a narrower one; rewards outside have none. Rollouts count as independent."
)
_SET_NOTE = "Band of sets: interval of 95 % by bootstrap over prompts, as the run computed it ({count} prompts)."
_LOG_RANGE = 100.0
"""Smallest ratio of the largest and the smallest value for a logarithmic axis."""

_SIMPLE: tuple[tuple[str, str, str, str], ...] = (
    ("loss", "Loss", "", POLICY),
    ("entropy", "Entropy", "nats", POLICY),
    ("masked_share", "Masked share", "share of tokens", POLICY),
    ("ess", "Effective sample size", "share of tokens", POLICY),
    ("grad_norm", "Gradient norm", "", POLICY),
    ("learning_rate", "Learning rate", "", POLICY),
    ("reference_kl", "KL to the reference model", "nats", POLICY),
    ("teacher_kl", "KL to the teacher", "nats", POLICY),
    ("routing_mismatch", "Router mismatch", "share", POLICY),
    ("replayed_share", "Tokens with replayed experts", "share of tokens", POLICY),
)
"""Fields of a record that are a plot of their own, with title, unit and section."""


def learning_plots(runs: Sequence[RunMaterial]) -> list[Plot]:
    """Return the plots that have data, in the order of the page."""
    plots = [
        _reward(runs),
        _held_out(runs),
        *_by_environment(runs),
        *_sets(runs),
        _held_out_loss(runs),
        _mismatch(runs),
        *(_simple(runs, *each) for each in _SIMPLE),
        _staleness(runs),
        *_mappings(runs),
    ]
    return [plot for plot in plots if plot.lines]


def _reward(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot("reward", "Reward", "mean of the batch", ("reward_mean",), LEARNING)
    for number, each in enumerate(runs):
        single = line_of(each.history.records, lambda record: record.reward_mean, "each step" if len(runs) == 1 else "")
        plot.add(number, [single], "faint")
        mean = reward_line(each.finished, label="moving mean" if len(runs) == 1 else "")
        if not mean.known:
            smooth = smoothed(single)
            mean = Line("moving mean" if len(runs) == 1 else "", smooth.xs, smooth.ys)
            if mean.known and each.finished.why_not:
                plot.notes.append(f"{each.history.name}: no interval, because {each.finished.why_not}")
        plot.add(number, [mean], "bold")
    return plot


def _held_out(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot("heldout", "Held-out reward", "mean", ("heldout_reward", "heldout_count"), LEARNING)
    for number, each in enumerate(runs):
        evaluations = each.history.evaluations
        plot.add(number, [_evaluated(evaluations, lambda e: e.reward, lambda e: e.count, "")], "points")
    return plot


def _evaluated(
    evaluations: Sequence[Evaluation],
    value: Callable[[Evaluation], float | None],
    count: Callable[[Evaluation], int],
    label: str,
) -> Line:
    """Return a line of evaluations with intervals by number of rollouts."""
    xs, ys, lows, highs = list[float](), list[float | None](), list[float | None](), list[float | None]()
    counts = set[int]()
    for evaluation in evaluations:
        if (mean := known(value(evaluation))) is None:
            continue
        ends = wilson_interval(mean, count(evaluation))
        xs.append(evaluation.version)
        ys.append(mean)
        lows.append(None if ends is None else ends[0])
        highs.append(None if ends is None else ends[1])
        if ends is not None:
            counts.add(count(evaluation))
    span = str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}" if counts else ""
    return Line(label, xs, ys, lows, highs, _SHARE_NOTE.format(count=span) if counts else "")


def _by_environment(runs: Sequence[RunMaterial]) -> list[Plot]:
    trained = Plot("reward-env", "Reward by environment", "mean of the batch", ("reward_by_env/",), LEARNING)
    held_out = Plot("heldout-env", "Held-out reward by environment", "mean", ("heldout_by_env/",), LEARNING)
    for number, each in enumerate(runs):
        lines = [reward_line(each.finished, name, name) for name in each.finished.environments]
        if not lines:
            lines = [smoothed(line) for line in lines_of(each.history.records, lambda record: record.reward_by_env)]
        trained.add(number, lines)
        evaluations = each.history.evaluations
        names = sorted({name for evaluation in evaluations for name in evaluation.by_env})
        held_out.add(number, [_evaluated_environment(evaluations, name) for name in names], "points")
    return [trained, held_out]


def _evaluated_environment(evaluations: Sequence[Evaluation], name: str) -> Line:
    return _evaluated(evaluations, lambda e: e.by_env.get(name), lambda e: e.counted_by_env.get(name, 0), name)


def _sets(runs: Sequence[RunMaterial]) -> list[Plot]:
    names = dict.fromkeys(found.set for each in runs for found in each.history.sets)
    plots: list[Plot] = []
    for name in names:
        plot = Plot(f"set-{len(plots)}", f"Evaluation set {name}", "mean over prompts", ("heldout_reward",), LEARNING)
        for number, each in enumerate(runs):
            plot.add(number, [_set_line([found for found in each.history.sets if found.set == name])], "points")
        plots.append(plot)
    return plots


def _set_line(found: Sequence[SetEvaluation]) -> Line:
    counts = sorted({each.mean.prompts for each in found})
    return Line(
        "",
        [each.version for each in found],
        [known(each.mean.value) for each in found],
        [known(each.mean.low) for each in found],
        [known(each.mean.high) for each in found],
        _SET_NOTE.format(count=", ".join(map(str, counts))),
    )


def _held_out_loss(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot("heldout-loss", "Held-out loss", "nats", ("held_out_loss",), LEARNING)
    for number, each in enumerate(runs):
        records = [record for record in each.history.records if record.held_out_loss is not None]
        plot.add(number, [line_of(records, lambda record: record.held_out_loss)], "points")
    return plot


def _mismatch(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot(
        "mismatch",
        "Mismatch KL of engine and trainer",
        "nats",
        ("mismatch_kl", "replayed_mismatch_kl", "unreplayed_mismatch_kl"),
        POLICY,
    )
    for number, each in enumerate(runs):
        records = each.history.records
        plot.add(number, [line_of(records, lambda record: record.mismatch_kl, "all tokens")])
        for name, words in (("replayed", "with router replay"), ("unreplayed", "without replay")):
            probed = [record for record in records if getattr(record, f"{name}_mismatch_kl") is not None]
            values = [known(getattr(record, f"{name}_mismatch_kl")) for record in probed]
            line = Line(words, [record.step for record in probed], values)
            plot.add(number, [line], "points")
    _choose_axis(plot)
    return plot


def _choose_axis(plot: Plot) -> None:
    """Take a logarithmic axis where values above 0 lie far apart; values of 0 are not shown then."""
    values = sorted(y for _, _, line in plot.lines for y in line.ys if y is not None)
    if values and values[0] >= 0.0:
        above = [value for value in values if value > 0.0]
        # quantiles: one value near 0 must not decide
        if above and above[int(0.95 * (len(above) - 1))] > _LOG_RANGE * above[int(0.05 * (len(above) - 1))]:
            plot.log = True
            plot.notes.append("Logarithmic axis; values of 0 are not shown.")


def _simple(runs: Sequence[RunMaterial], name: str, title: str, unit: str, section: str) -> Plot:
    plot = Plot(name.replace("_", "-"), title, unit, (name,), section)
    for number, each in enumerate(runs):
        plot.add(number, [line_of(each.history.records, attrgetter(name))])
    return plot


def _staleness(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot(
        "staleness",
        "Staleness of trained rollouts",
        "policy versions",
        ("staleness_mean", "staleness_max"),
        POLICY,
    )
    for number, each in enumerate(runs):
        records = [record for record in each.history.records if record.staleness_histogram]
        plot.add(number, [line_of(records, lambda record: record.staleness_mean, "mean")], "bold")
        plot.add(number, [line_of(records, lambda record: float(record.staleness_max), "largest")], "faint")
    bounds = dict.fromkeys(each.recipe.rollouts.max_off_policy_steps for each in runs)
    plot.levels = [(float(bound), f"max_off_policy_steps = {bound}") for bound in bounds]
    return plot


def _mappings(runs: Sequence[RunMaterial]) -> list[Plot]:
    wanted: tuple[tuple[str, str, str, Callable[[StepRecord], Mapping[str, float]]], ...] = (
        ("mismatch_kl_by_lag/", "Mismatch KL by lag", "nats", lambda record: record.mismatch_kl_by_lag),
        ("mismatch_kl_by_env/", "Mismatch KL by environment", "nats", lambda record: record.mismatch_kl_by_env),
        ("entropy_by_env/", "Entropy by environment", "nats", lambda record: record.entropy_by_env),
        ("reward_parts/", "Parts of the reward", "mean", lambda record: record.reward_parts),
        ("loss_metrics/", "Metrics of the loss", "", lambda record: record.loss_metrics),
    )
    plots = []
    for name, title, unit, values in wanted:
        section = LEARNING if name.startswith("reward") else POLICY
        plot = Plot(name.strip("/").replace("_", "-"), title, unit, (name,), section)
        for number, each in enumerate(runs):
            plot.add(number, [smoothed(line) for line in lines_of(each.history.records, values)])
        if plot.lines:
            plot.notes.append("Lines are moving means over a tenth of the run.")
        if name.startswith("mismatch"):
            _choose_axis(plot)
        plots.append(plot)
    return plots

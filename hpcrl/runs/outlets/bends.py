"""Likely causes of what a curve does, and what to do about it; docs/observing.md and pages of runs have the table."""

from __future__ import annotations

from typing import NamedTuple


class Bend(NamedTuple):
    """A change of one or more curves.

    Attributes
    ----------
    curves:
        Names of the curves in sinks.
    what, cause, action:
        What a reader sees, its likely cause, and what to do, in Markdown.
    """

    curves: tuple[str, ...]
    what: str
    cause: str
    action: str


BENDS: tuple[Bend, ...] = (
    Bend(
        (
            "reward/mean",
            "heldout/reward",
        ),
        "`reward/mean` rises and `heldout/reward` does not",
        "The policy learns the training prompts.",
        "More prompts; fewer steps for each.",
    ),
    Bend(
        ("reward/mean",),
        "`reward/mean` jumps up with short replies",
        "The policy gets the reward without solving the task.",
        "Read rollouts (`hpcrl rollouts show`), then `hpcrl rollouts rescore` with a better reward.",
    ),
    Bend(
        ("entropy/all/mean",),
        "`entropy/all/mean` falls to 0",
        "The policy repeats itself.",
        "A lower learning rate, or `algorithm.kl`.",
    ),
    Bend(
        ("mismatch_kl/all/mean",),
        "`mismatch_kl/all/mean` rises over 0.01",
        "Engine and trainer compute different things.",
        "Router replay for mixtures of experts; the same precision on both sides.",
    ),
    Bend(
        ("is_masked/mean",),
        "`is_masked/mean` rises",
        "Rollouts are too old, or the mismatch is large.",
        "A lower `rollouts.max_off_policy_steps`.",
    ),
    Bend(
        ("is_masked_low/mean", "is_masked_high/mean"),
        "`is_masked_low/mean` or `is_masked_high/mean` rises, and the other does not",
        "Low: the policy left tokens of bad rollouts, or the engine samples what the trainer finds unlikely. High: it "
        "moved far towards tokens of good ones.",
        "Look at `mismatch_kl/lag/NAME`: high at lag 0 it is the mismatch, else a lower learning rate.",
    ),
    Bend(
        ("entropy/env/NAME", "mismatch_kl/env/NAME"),
        "`entropy/env/NAME` or `mismatch_kl/env/NAME` of one environment leaves the others",
        "The policy repeats itself there; or its replies are longer or in another format, so that errors add up.",
        "Read its rollouts (`hpcrl rollouts ls RUN --environment NAME`); the `weight` of the environments.",
    ),
    Bend(
        ("importance/ess",),
        "`importance/ess` falls under 0.5",
        "Few tokens carry the gradient.",
        "As for `mismatch_kl/all/mean`.",
    ),
    Bend(
        (
            "optim/grad_norm",
            "optim/skipped",
        ),
        "`optim/grad_norm` jumps, `optim/skipped` is 1",
        "A batch with extreme ratios or numbers that are not finite.",
        "`hpcrl why` names the rollouts; a lower `trainer.optimizer.max_grad_norm`.",
    ),
    Bend(
        ("off_policy/max",),
        "`off_policy/max` stays at the bound",
        "Rollouts are dropped because they are too old.",
        "Fewer `rollouts.max_in_flight`.",
    ),
    Bend(
        ("off_policy/dropped",),
        "`off_policy/dropped` rises faster from step to step",
        "Rollouts take longer than the staleness bound lets them live.",
        "Fewer `rollouts.max_in_flight`, or a higher `rollouts.max_off_policy_steps`.",
    ),
    Bend(
        ("rollouts/in_queue", "off_policy/in_queue/mean", "off_policy/in_queue/max"),
        "`rollouts/in_queue` or `off_policy/in_queue/mean` rises",
        "Engines finish more rollouts than the trainer takes, and these become old in the queue.",
        "Fewer engines or more ranks of the trainer; a lower `rollouts.ready_batches`.",
    ),
    Bend(
        ("rollouts/in_flight", "off_policy/in_flight/mean", "off_policy/in_flight/max"),
        "`rollouts/in_flight` falls below its limit, or `off_policy/in_flight/max` comes to the bound",
        "Few run: they wait for a version or for memory (`time/wait_for_policy`). Old ones: a few rollouts take long.",
        "`hpcrl why --slow`; a smaller `rollouts.sampling.max_new_tokens`, or timeouts of the environment.",
    ),
    Bend(
        ("time/wait_for_policy",),
        "`time/wait_for_policy` rises",
        "The staleness bound holds engines back: the trainer is slower than they are, or versions load slowly.",
        "A higher `rollouts.max_off_policy_steps`, or more ranks of the trainer; look at `page/update_s`.",
    ),
    Bend(
        ("time/wait_for_batch",),
        "`time/wait_for_batch` is most of a step",
        "Engines or environments are the limit.",
        "`hpcrl why --slow` says which of them, and which settings would change it.",
    ),
    Bend(
        ("perf/throughput", "perf/throughput_per_gpu", "length/all/mean"),
        "`perf/throughput` falls slowly",
        "Rollouts get longer.",
        "Look at `perf/tokens` and `length/all/mean`; `rollouts.sampling.max_new_tokens`.",
    ),
    Bend(
        ("perf/mfu",),
        "`perf/mfu` falls",
        "The trainer waits, or computes less well: short micro-batches, recomputation, slow exchanges.",
        "Look at `time/wait_for_batch` and `time/forward_backward`; `hpcrl profile RUN` shows its kernels.",
    ),
    Bend(
        ("kl_ent_ratio/mean",),
        "`kl_ent_ratio/mean` rises",
        "The mismatch grows, or the entropy falls, so that an equal mismatch weighs more.",
        "Look at `mismatch_kl/all/mean` and `entropy/all/mean`: as for the one that moved.",
    ),
    Bend(
        ("perf/peak_memory",),
        "`perf/peak_memory` comes near the memory of the GPU",
        "Sequences or micro-batches grew; the next longer one may end the trainer.",
        "The tools of `trainer.memory` (docs/training.md); `hpcrl profile RUN --memory` shows what holds it.",
    ),
    Bend(
        ("reward/std", "page/zero_variance"),
        "`reward/std` falls to 0, `page/zero_variance` rises",
        "All rollouts of a prompt get the same reward: prompts are too easy, too hard, or the policy repeats itself.",
        "Other prompts, or `curriculum` of the environment; look at `entropy/all/mean`.",
    ),
    Bend(
        ("reward/count", "reward_count/NAME", "reward_part_count/NAME"),
        "`reward/count` or `reward_count/NAME` falls",
        "Rollouts fail or are dropped, so that fewer are trained, or an environment has fewer.",
        "Look at `page/drops`; `hpcrl why`, and `hpcrl logs RUN --role orchestrator`.",
    ),
    Bend(
        ("reward/NAME", "heldout/reward/NAME"),
        "`reward/NAME` of one environment falls while others rise",
        "Environments compete, or one of them is broken.",
        "Read its rollouts (`hpcrl rollouts ls RUN --environment NAME`); the `weight` of the environments.",
    ),
    Bend(
        ("reward_part/NAME", "heldout/part/NAME"),
        "A penalty's `reward_part/NAME` falls, or one part carries all of the reward",
        "The policy gives up one part for another.",
        "Other weights of `rewards`; read rollouts.",
    ),
    Bend(
        ("heldout/count", "heldout/failed"),
        "`heldout/failed` rises, `heldout/count` falls",
        "Environments, sandboxes or engines fail during evaluations; the mean is of the others.",
        "`hpcrl logs RUN --role orchestrator`; do not compare this version with others.",
    ),
    Bend(
        ("heldout/loss",),
        "`heldout/loss` rises while `loss/policy` falls (`hpcrl sft`)",
        "The model learns the training conversations by heart.",
        "Fewer epochs; an earlier checkpoint.",
    ),
    Bend(
        ("loss/policy",),
        "`loss/policy` jumps by a factor",
        "The gradient is dominated by few tokens, or the batch differs in kind.",
        "Look at `importance/ess`, `optim/grad_norm` and `mismatch_kl/all/mean` of this step.",
    ),
    Bend(
        ("entropy/all/mean",),
        "`entropy/all/mean` rises without end",
        "The policy becomes noise; often after a step that was too large.",
        "A lower learning rate, `algorithm.kl`; go on from an earlier checkpoint (`hpcrl resume --from-step`).",
    ),
    Bend(
        ("reference_kl/mean",),
        "`reference_kl/mean` rises fast",
        "The policy leaves the reference model; the reward may be exploited.",
        "A larger `algorithm.kl.coefficient`, or a lower learning rate; read rollouts.",
    ),
    Bend(
        ("teacher_kl/mean",),
        "`teacher_kl/mean` stays or rises",
        "The student does not follow its teacher: other chat format, or a learning rate that is too low or too high.",
        "Compare the prompts of both; another learning rate.",
    ),
    Bend(
        ("optim/lr",),
        "`optim/lr` is not what you expect",
        "A resume with another `trainer.steps` changes a schedule that depends on it.",
        "`trainer.optimizer.schedule` and `warmup_steps` in *Recipe and code*.",
    ),
    Bend(
        ("optim/nonfinite_tokens",),
        "`optim/nonfinite_tokens` is above 0",
        "An engine or the trainer overflows.",
        "`hpcrl why` names the rollouts; bfloat16 in place of float16, no fp8, on the side that overflows.",
    ),
    Bend(
        ("off_policy/mean", "off_policy/p50", "off_policy/p90", "off_policy/histogram/NAME"),
        "`off_policy/mean` rises, `off_policy/histogram/NAME` moves to high numbers",
        "Rollouts take longer than a step: long replies, or slow environments.",
        "Fewer `rollouts.max_in_flight`; more engines; `hpcrl why --slow`.",
    ),
    Bend(
        (
            "perf/tokens",
            "perf/sampled_tokens",
            "page/sampled_length",
            "length/sampled/mean",
            "length/sampled/p50",
            "length/sampled/p90",
            "length/sampled/max",
        ),
        "`perf/sampled_tokens` or `page/sampled_length` rises to the limit",
        "Replies are cut at `max_new_tokens`, and a cut reply rarely has a reward.",
        "A larger `rollouts.sampling.max_new_tokens`, or a penalty for length.",
    ),
    Bend(
        ("perf/tokens", "branches/mean", "branches/max"),
        "`branches/mean` rises, and `perf/tokens` with it",
        "Agents shorten or rewrite their context: a rollout has several sequences, and tokens are computed again.",
        "Read rollouts; a chat format that keeps earlier turns (docs/environments.md).",
    ),
    Bend(
        (
            "router/mismatch",
            "router/mismatch_lag/NAME",
            "router/unknown/NAME",
            "router/replayed_share",
            "r3/routed_experts_fallback_token_route_fraction",
        ),
        "`router/mismatch` or `router/unknown/NAME` rises, `router/replayed_share` falls",
        "Engines return no experts for some tokens, or compute the router in another precision.",
        "`engine.return_routed_experts` and `trainer.router_replay` (docs/training.md).",
    ),
    Bend(
        ("mismatch_kl/replayed/mean", "mismatch_kl/unreplayed/mean"),
        "`mismatch_kl/replayed/mean` is as large as `mismatch_kl/unreplayed/mean`",
        "The mismatch is not of the router: kernels, precision or weights differ.",
        "The same dtype on both sides; `hpcrl why` says whether an engine computed with other weights.",
    ),
    Bend(
        ("mismatch_kl/lag/NAME",),
        "`mismatch_kl/lag/NAME` is high at lag 0",
        "Engine and trainer differ with the same weights.",
        "As for `mismatch_kl/all/mean`. At larger lags alone it is age: a lower `rollouts.max_off_policy_steps`.",
    ),
    Bend(
        ("time/NAME", "time/step", "time/broadcast_weights", "time/save_ckpt", "page/steps_s"),
        "`time/step` or `page/steps_s` rises, or one phase of `time/NAME` does",
        "Batches grew, a filesystem is slow (`time/save_ckpt`, `time/broadcast_weights`), or a node is.",
        "`hpcrl why --slow`; `hpcrl profile RUN` for a phase of the trainer.",
    ),
    Bend(
        ("rollouts/NAME", "page/drops"),
        "`page/drops` or a counter `rollouts/dropped_*` rises",
        "Its name has the cause: too old, failed, lost with an engine, or equal rewards.",
        "Too old: fewer `rollouts.max_in_flight`. Failed: `hpcrl logs`. Equal rewards: other prompts.",
    ),
    Bend(
        ("loss_metrics/NAME",),
        "`loss_metrics/NAME` leaves its usual range",
        "It is what your loss measures.",
        "What the loss says of it.",
    ),
    Bend(
        ("page/repeated_requests",),
        "`page/repeated_requests` rises",
        "An engine was lost or hangs, or the router or the network loses connections.",
        "Marks of faults at these steps; `hpcrl status` shows engines, `hpcrl logs RUN --role engine` their words.",
    ),
    Bend(
        ("page/update_s", "page/pause_s"),
        "`page/update_s` or `page/pause_s` rises",
        "The filesystem or network that carries weights is slow, or an engine is busy.",
        "`handoff` in docs/handoff.md; `hpcrl why --slow`.",
    ),
    Bend(
        ("page/checkpoint_s",),
        "`page/checkpoint_s` rises, or its part that blocks steps does",
        "The filesystem is slow, or nearly full.",
        "A larger `checkpoint.every_steps`; `hpcrl status` warns of space.",
    ),
    Bend(
        ("page/goodput", "page/idle_s"),
        "`page/goodput` falls, `page/idle_s` rises",
        "Attempts end early, starts are slow, or one role waits for another.",
        "The table of seconds by cause; `hpcrl why` for ends, `hpcrl why --slow` for waits.",
    ),
    Bend(
        ("inference/engines", "inference/engines_silent"),
        "`inference/engines` falls, or `inference/engines_silent` is above 0",
        "Engines were lost, start again, or hang.",
        "`hpcrl status` shows each engine; `hpcrl why`, and `hpcrl logs RUN --role engine`.",
    ),
    Bend(
        ("inference/agg/num_requests_running/NAME", "inference/agg/num_requests_waiting/NAME"),
        "`inference/agg/num_requests_waiting/mean` rises",
        "Engines have more requests than they compute at once.",
        "More engines, a larger `engine.max_num_seqs` where the KV cache has room, or fewer `rollouts.max_in_flight`.",
    ),
    Bend(
        ("inference/agg/kv_cache_usage_perc/NAME", "inference/agg/num_preemptions_total/NAME"),
        "`inference/agg/kv_cache_usage_perc/max` comes near 1, `inference/agg/num_preemptions_total/max` rises",
        "Sequences do not fit into the KV cache, and those that lose their place are computed again.",
        "Fewer `rollouts.max_in_flight`, a smaller `engine.max_num_seqs`, or more engines.",
    ),
    Bend(
        ("inference/agg/prefix_cache_hit_rate/NAME",),
        "`inference/agg/prefix_cache_hit_rate/mean` falls",
        "Later turns of a rollout come to other engines, or their prefixes have left a KV cache that is full.",
        "Look at `inference/agg/kv_cache_usage_perc/max`; `engine.kv_store` (docs/inference.md).",
    ),
    Bend(
        ("inference/agg/generation_tokens_per_s/NAME",),
        "`inference/agg/generation_tokens_per_s/min` falls far below `mean`",
        "One engine is slow, or has few requests.",
        "`hpcrl status` shows each engine; `hpcrl profile RUN --role engine/1 --stacks` for the slow one.",
    ),
    Bend(
        ("inference/agg/versions_behind/NAME",),
        "`inference/agg/versions_behind/max` rises",
        "An engine does not load new versions, or loads them more slowly than the trainer makes them.",
        "Look at `page/update_s`; `hpcrl why`, and docs/handoff.md.",
    ),
    Bend(
        ("perf/gpu_hours",),
        "`perf/gpu_hours` rises faster from step to step",
        "Steps take longer, or attempts ended and their last steps were computed again.",
        "Look at `time/step` and `page/goodput`; `hpcrl why`.",
    ),
)

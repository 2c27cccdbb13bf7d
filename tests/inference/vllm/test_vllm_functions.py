"""Functions of a real vLLM, called without a server: one process loads vLLM, and each program runs in a fork of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from vllm_environment import VLLM_PYTHON

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

BESIDE_TRANSFER = """
from types import SimpleNamespace
from hpcrl.inference.vllm.experts import allow_beside_transfer
from vllm.config import KVTransferConfig, VllmConfig

def refusal(stages):
    config = VllmConfig.__new__(VllmConfig)
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "pipeline_parallel_size": stages}
    vars(config).update(
        aux_output_config=SimpleNamespace(enabled=True),
        model_config=SimpleNamespace(runner_type="generate", is_moe=True),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        speculative_config=None,
        parallel_config=SimpleNamespace(**sizes),
        kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"),
    )
    try:
        config._verify_aux_output_compatibility()
    except ValueError as error:
        return str(error)
    finally:
        assert config.kv_transfer_config.kv_connector == "NixlConnector"

VllmConfig.use_v2_model_runner = True
assert "PD auxiliary output is not supported" in refusal(1)
allow_beside_transfer()
allow_beside_transfer()
assert refusal(1) is None
assert "pipeline parallelism" in refusal(2)
"""

UNCOUNTED = """
from types import SimpleNamespace
from hpcrl.inference.vllm.connector_metrics import leave_out_uncounted
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorPromMetrics

seen = []
metrics = MultiKVConnectorPromMetrics.__new__(MultiKVConnectorPromMetrics)
metrics._prom_metrics = {"store": SimpleNamespace(observe=lambda stats, engine: seen.append((stats, engine)))}
moved = {"between sides": {"bytes": 1}, "store": {"bytes": 2}}
try:
    metrics.observe(moved, 3)
except AssertionError:
    pass
else:
    raise SystemExit("vLLM has mended it")
leave_out_uncounted()
leave_out_uncounted()
metrics.observe(moved, 3)
metrics.observe({"between sides": {"bytes": 4}}, 5)
assert seen == [({"bytes": 2}, 3)], seen
"""

FETCHES = """
from types import SimpleNamespace
from hpcrl.inference.vllm.fetches import TRIES, limit_fetches
from vllm.v1.core.sched.scheduler import Scheduler

limit_fetches()
limit_fetches()
blocks = SimpleNamespace(free=lambda request: None, cache_blocks=lambda request, tokens: None)
scheduler = Scheduler.__new__(Scheduler)
vars(scheduler).update(
    connector=object(),
    kv_cache_manager=blocks,
    needs_kv_cache_zeroing=False,
    prefix_replay_tokens=0,
    failed_recving_kv_req_ids=set(),
    finished_recving_kv_req_ids=set(),
)

def given_up(computed, failures):
    request = SimpleNamespace(
        request_id="r", num_computed_tokens=0, num_tokens=100, skip_reading_prefix_cache=False, replay_start=None
    )
    for _ in range(failures):
        request.num_computed_tokens = computed
        scheduler.finished_recving_kv_req_ids.add("r")
        scheduler.failed_recving_kv_req_ids.add("r")
        scheduler._update_waiting_for_remote_kv(request)
    return request.skip_reading_prefix_cache

assert TRIES == 2
assert [given_up(0, failures) for failures in (0, 1, 2, 3)] == [False, False, True, True]
assert not given_up(32, 5)
"""

ROTATE = """
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from hpcrl.inference.vllm.cpu import apply_corrections

apply_corrections()
torch.manual_seed(0)
positions, heads, size = torch.arange(5), 3, 64
with set_current_vllm_config(VllmConfig()):
    for is_neox_style in (True, False):
        rope = RotaryEmbedding(size, size, 512, 10000.0, is_neox_style, torch.float32)
        query, key = torch.randn(5, heads, 2 * size)[..., size:], torch.randn(5, 1, size)
        wanted = rope.forward_native(positions, query.flatten(1), key.flatten(1))
        given = rope.forward_cpu(positions, query.clone(), key.clone())
        for a, b in zip(given, wanted, strict=True):
            torch.testing.assert_close(a.flatten(1), b)
"""

FORK = """
import os
import socket
from hpcrl.inference.vllm.cpu import apply_corrections
from vllm.config import VllmConfig
from vllm.utils.system_utils import get_mp_context

def method(asked):
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = asked
    VllmConfig()
    return get_mp_context().get_start_method()

assert [method(asked) for asked in ("fork", "spawn")] == ["spawn", "spawn"]
apply_corrections()
assert [method(asked) for asked in ("fork", "spawn")] == ["fork", "spawn"]
server = socket.create_server(("127.0.0.1", 0))
address = server.getsockname()
there = socket.create_connection(address)
here, _ = server.accept()
child = os.fork()
if not child:
    try:
        server.getsockname()
    except OSError:
        # what is connected stays
        os._exit(here.send(b"hello") - 5)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert there.recv(5) == b"hello"
server.getsockname()
"""

BITS = """
import torch
from cuda_arithmetic import DividesAsCuda
from vllm.utils.deep_gemm import per_block_cast_to_fp8
from hpcrl.modeling.fp8.quantiser import quantise_blocks

generator = torch.Generator().manual_seed(0)
# ordinary weights, a matrix below the floor of scales, zeros; some with blocks that are not whole
for scale in (1.0, 0.02, 1e-5, 0.0):
    for rows, columns in ((576, 256), (130, 300), (256, 512)):
        weight = (torch.randn(rows, columns, generator=generator) * scale).bfloat16()
        own = quantise_blocks(weight)
        mine = own.values[:rows, :columns].contiguous()
        # as torch divides on a GPU, and as inductor does there
        with torch.compiler.set_stance("force_eager"), DividesAsCuda() as device:
            values, scales = per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
        assert device.quotients == 1
        assert torch.equal(own.scales, scales), (scale, rows)
        assert torch.equal(mine.view(torch.uint8), values.view(torch.uint8)), (scale, rows)
        # a processor divides by 448 as IEEE says: a scale may differ in its last bit, and numbers that it rounds
        values, scales = per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
        torch.testing.assert_close(own.scales, scales, rtol=1.2e-7, atol=0)
        differ = (mine.view(torch.uint8) != values.view(torch.uint8)).float().mean()
        assert differ < 0.01, (scale, rows, differ)
"""

SCALES = """
import os
import torch
from types import SimpleNamespace
from hpcrl.modeling.fp8.quantiser import quantise_blocks
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.utils import deep_gemm

# DeepGEMM and its GPU are not here: that it would be used is said, and its own layout of scales is left out
deep_gemm._lazy_init = lambda: None
deep_gemm._fp8_gemm_nt_impl = object()
deep_gemm.is_deep_gemm_supported = lambda: True
fp8_utils.transform_sf_into_required_layout = lambda sf, **_: sf
weight = (torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
own = quantise_blocks(weight)

def served(variable):
    os.environ.pop("VLLM_USE_DEEP_GEMM_E8M0", None)
    os.environ.update(variable)
    deep_gemm.is_deep_gemm_e8m0_used.cache_clear()
    values, scales = fp8_utils.deepgemm_post_process_fp8_weight_block(
        own.values.clone(), own.scales.clone(), (128, 128), deep_gemm.is_deep_gemm_e8m0_used()
    )
    return (values.view(torch.uint8) != own.values.view(torch.uint8)).float().mean().item(), scales

changed, scales = served({"VLLM_USE_DEEP_GEMM_E8M0": "0"})
assert changed == 0 and torch.equal(scales, own.scales)
# left alone vLLM rounds scales up to powers of two, and values with them
changed, scales = served({})
assert changed > 0.9 and torch.equal(scales.log2(), scales.log2().round())
"""

WAIT = """
import time
from hpcrl.inference.vllm.cpu import apply_corrections
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

apply_corrections()
writer = MessageQueue(1, 1)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
for number in range(3):
    writer.enqueue(number)
    assert reader.dequeue(timeout=60.0) == number
before_s = time.thread_time()
try:
    reader.dequeue(timeout=0.9)
    raise AssertionError("nothing was sent")
except TimeoutError:
    pass
used_s = time.thread_time() - before_s
# who looks without a pause has a processor for all of the time, and half of one beside another busy process
assert used_s < 0.2, used_s
"""

SEND = """
import os
import signal
import time
import numpy as np
from hpcrl.inference.vllm import cpu

cpu.apply_corrections()
from mooncake.engine import TransferEngine

def engine_with(data):
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(data.ctypes.data, data.nbytes) == 0
    return engine

reader, writer = os.pipe()
child = os.fork()
if not child:
    there = np.zeros(1 << 20, np.uint8)
    engine = engine_with(there)
    os.write(writer, f"{engine.get_rpc_port()} {there.ctypes.data}".encode())
    while not there.all():
        time.sleep(0.01)
    os.write(writer, b"all")
    time.sleep(600)
try:
    port, address = map(int, os.read(reader, 99).split())
    here = np.ones(1 << 20, np.uint8)
    engine, piece = engine_with(here), 1 << 16

    def send(target):
        starts = range(0, here.nbytes, piece)
        ours, theirs = [here.ctypes.data + start for start in starts], [address + start for start in starts]
        return engine.batch_transfer_sync_write(target, ours, theirs, [piece] * len(starts))

    assert send(f"127.0.0.1:{port}") == 0
    assert os.read(reader, 99) == b"all"
    assert send("127.0.0.1:1") == -1
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)  # a stop takes until one of its threads runs: another may answer before
    cpu._SEND_S, before_s, began_s = 1.0, time.thread_time(), time.monotonic()
    assert send(f"127.0.0.1:{port}") == -1
    assert time.monotonic() - began_s >= 1.0
    assert time.thread_time() - before_s < 0.3
finally:
    os.kill(child, signal.SIGKILL)
"""

PROGRAMS = {
    "beside transfer": BESIDE_TRANSFER,
    "fetches": FETCHES,
    "uncounted": UNCOUNTED,
    "rotate": ROTATE,
    "fork": FORK,
    "wait": WAIT,
    "send": SEND,
    "bits": BITS,
    "scales": SCALES,
}
#: loads what all of them need; what one of them changes, the next does not find
ALL = """
import json
import os
import sys
import traceback
import vllm.config
import vllm.model_executor.layers.quantization.utils.fp8_utils
import vllm.model_executor.layers.rotary_embedding.base
import vllm.utils.deep_gemm
import vllm.v1.core.sched.scheduler

said = {}
for name, program in json.load(sys.stdin).items():
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            exec(compile(program, name, "exec"), {"__name__": name})
            word = "done"
        except BaseException:
            word = traceback.format_exc()
        os.write(writer, word.encode()[-9000:])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said[name] = stream.read()
    os.waitpid(child, 0)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What became of each program."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "VLLM_NO_USAGE_STATS": "1"}
    if " " in str(VLLM_PYTHON):
        environment["TORCHDYNAMO_DISABLE"] = "1"  # on processors, Inductor cannot link with a torch at such a path
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", ALL],
        input=json.dumps(PROGRAMS),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_experts_are_returned_with_a_connector_and_all_else_is_still_checked(said: dict[str, str]) -> None:
    """vLLM's own check, as it is on accelerators; that of the CPU build is a correction's."""
    assert said["beside transfer"] == "done"


def test_a_request_whose_kv_cannot_be_fetched_is_computed_after_two_tries(said: dict[str, str]) -> None:
    """By vLLM's own scheduler; what a real pool does then is in `test_vllm_pool.py`."""
    assert said["fetches"] == "done"


def test_what_a_connector_counts_without_a_metric_ends_no_server(said: dict[str, str]) -> None:
    """MooncakeConnector beside the pool's connector: prefill and decode with a KV pool."""
    assert said["uncounted"] == "done"


def test_queries_of_latent_attention_are_rotated_like_those_of_others(said: dict[str, str]) -> None:
    """Those of a DeepSeek-V3 are a part of each head, and have three dimensions."""
    assert said["rotate"] == "done"


def test_processes_of_an_engine_are_forked(said: dict[str, str]) -> None:
    """Where the environment asks for it, and only there; and none of them keeps its parent's port."""
    assert said["fork"] == "done"


def test_what_waits_for_another_process_of_an_engine_leaves_the_processor(said: dict[str, str]) -> None:
    """Less than a second after a message, when vLLM alone would look without a pause."""
    assert said["wait"] == "done"


def test_who_sends_kv_leaves_the_processor(said: dict[str, str]) -> None:
    """What is sent arrives; a peer that is gone or stopped is a failure, for which nobody has computed meanwhile."""
    assert said["send"] == "done", said["send"]


def test_online_quantisation_makes_the_same_bits(said: dict[str, str]) -> None:
    """With the quotients of a GPU every bit is that of our quantiser: `per_block_cast_to_fp8` is what
    ``quantization: fp8_per_block`` calls for linear layers and for each expert, in bfloat16, when it loads them."""
    assert said["bits"] == "done"


def test_engines_keep_the_weights_that_the_trainer_has_quantised(said: dict[str, str]) -> None:
    """With the variable that plans give to engines beside a trainer in FP8; by vLLM's default nine of ten change."""
    assert said["scales"] == "done"

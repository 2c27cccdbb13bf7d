"""Trainer and engine in turns: what the engine gets, what the trainer gets back, and what that takes of the device."""

import asyncio
import os
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from aiohttp import web
from test_context_parallel import new_policy
from test_meshes import ARCHS, whole
from trainer_testing import Rollouts, StubDock, make_recipe, run_ranks, write_model_dir, write_recipe

from hpcrl.errors import HandoffError, PeerLostError
from hpcrl.inference.embedded.engine.config import EngineSettings
from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.serving.api_turns import TurnsApi
from hpcrl.inference.embedded.serving.errors import error_middleware
from hpcrl.inference.embedded.weights.turns import Turns
from hpcrl.inference.metrics import EngineMetrics, Registry
from hpcrl.modeling.hf import model_tensors, published_tensors
from hpcrl.modeling.memory.arena import Arena, memory_of
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import load_arch
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.role import Endpoints, RoleContext
from hpcrl.runs.rundir import RunDir
from hpcrl.trainer.loop import train
from hpcrl.trainer.memory.swap import HostSwap
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.publish.colocated_engines import ColocatedEngines
from hpcrl.trainer.publish.swap_sync import SwapSync
from hpcrl.trainer.step.phases import PhaseClock
from hpcrl.weights import HandoffStore
from hpcrl.weights.handover import HandoverLayer, SharedMemory, SharedTensor
from hpcrl.weights.read.model_files import ModelFiles

STEPS = 2
#: many layers: what is there twice is small beside the whole
FAMILIES = {"deep": replace(ARCHS["qwen3_moe"], num_hidden_layers=12), "glm_moe_dsa": ARCHS["glm_moe_dsa"]}
CASES = [("deep", {}), ("deep", {"ep": 2}), ("glm_moe_dsa", {"ep": 2})]


@contextmanager
def engine_of(arch):
    """An embedded engine's turns behind their HTTP face, and its model."""
    model = build_model(arch, device="cpu").requires_grad_(False).eval()
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64, "block_size": 16, "num_blocks": 8}
    engine = Engine(model, EngineSettings(**sizes), EngineMetrics(Registry({})))
    engine.start(lambda delivery: None)
    turns = Turns(engine, model)
    loop, ready = asyncio.new_event_loop(), threading.Event()
    address = []

    async def health(_):
        return web.Response()

    async def serve():
        app = web.Application(middlewares=[error_middleware], client_max_size=1 << 24)
        app.add_routes([*TurnsApi(turns).routes(), web.get("/health", health)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        return runner

    runner = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    assert ready.wait(20)
    try:
        yield address[0], turns, model
    finally:
        asyncio.run_coroutine_threadsafe(runner.result().cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        turns.close()
        engine.stop()


def tensors_of(model):
    return {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}


def take_turns(parallel, family, model_dir, url, served, *, swap):
    """Train some steps; with ``swap`` engines have the devices between them. Weights, what engines got, events."""
    policy = new_policy(model_dir, parallel, "ulysses", "masked_ratio")
    got, events, announced = [], [], []
    engines = ColocatedEngines([url], {}, timeout_s=20.0, start_timeout_s=20.0, on_wait=lambda: None)
    sync = SwapSync(parallel, engines, dtype=torch.float32, emit=lambda kind, **data: events.append(data))
    held = sum(own.size for own in memory_of(model_tensors(policy.model).values()))
    data, world, clock = parallel.data, parallel.world, PhaseClock()

    def hand_over(act):
        wanted = {name: whole(tensor).detach().clone() for name, tensor in model_tensors(policy.model).items()}
        act()
        # the trainer has nothing of the device now
        assert memory_of([*model_tensors(policy.model).values(), *moments(policy)]) == []
        if served is not None:
            found = tensors_of(served)
            assert found.keys() == wanted.keys()
            got.append(all(torch.equal(found[name], wanted[name]) for name in wanted))

    if swap:
        hand_over(lambda: sync.restored(policy, 0))
    for step in range(1, STEPS + 1):
        if swap:
            sync.begin_step(clock)
        policy.forward_backward(Rollouts(step).shard(data.rank, data.size)).reduce(world)
        policy.optimizer_step(step)
        if swap:
            sync.publish(policy, step, announced.append)
            hand_over(lambda: sync.end_step(clock))
    if swap:
        sync.begin_step(clock)
        assert clock.seconds()["swap"] > 0
    sync.close()
    weights = {name: whole(tensor).tolist() for name, tensor in model_tensors(policy.model).items()}
    return weights, got, events, announced, held


def moments(policy):
    return [value for state in policy.optimizer.state.values() for value in state.values() if value.dim()]


def on_ranks(rank, models):
    results = []
    with distributed(timeout_s=60) as start:
        for family, degrees in CASES:
            mesh = ParallelDims(world_size=2, **degrees)
            mesh.build_mesh("cpu")
            parallel = Parallel(mesh, start.device)
            plain = take_turns(parallel, family, models[family], "", None, swap=False)[0]
            if rank == 0:
                with engine_of(FAMILIES[family]) as (url, turns, served):
                    swapped = take_turns(parallel, family, models[family], url, served, swap=True)
                    results.append((plain, *swapped, turns.arena.device_peak))
            else:
                swapped = take_turns(parallel, family, models[family], "", None, swap=True)
                results.append((plain, *swapped, 0))
    return results


def test_two_ranks_hand_every_version_over_bit_for_bit_and_train_as_if_they_had_not(tmp_path):
    models = {name: write_model_dir(tmp_path / name, arch) for name, arch in FAMILIES.items()}
    leader, other = run_ranks(2, on_ranks, models, timeout_s=200.0)
    for number, case in enumerate(CASES):
        plain, swapped, got, events, announced, _, engine_peak = leader[number]
        assert plain == swapped, case
        assert other[number][0] == other[number][1], case
        assert got == [True] * (STEPS + 1), case
        assert announced == list(range(1, STEPS + 1))
        weights = leader[number][5] + other[number][5]
        assert [event["version"] for event in events] == list(range(STEPS + 1))
        # the first time there is no optimizer yet: the engine's weights come while the trainer's go. Beside one of the
        # two there are a layer in shared memory, and one that is in both
        if case[0] == "deep":
            assert weights < events[0]["device_peak_bytes"] <= max(weights * (1 + 2.5 / 12), engine_peak)
        # from then on, what is most is the trainer itself: its weights and two moments
        assert 2.5 * weights < events[-1]["device_peak_bytes"] < 3.5 * weights
        assert events[-1]["host_bytes"] > 2.5 * weights


def test_what_is_on_its_way_to_the_host_is_not_begun_again():
    tensors = [torch.full((size,), float(size)) for size in (1 << 16, 1 << 10, 3)]
    shared = tensors[0].view(2, -1)[1]
    arena = Arena()
    arena.add(device=sum(memory.size for memory in memory_of(tensors)))
    swap = HostSwap(torch.device("cpu"), arena)
    wanted = [tensor.clone() for tensor in (*tensors, shared)]
    for _ in range(3):
        swap.leave([tensors[0]])
        swap.leave([tensors[0], shared, tensors[1]])
        swap.leave(tensors)
        swap.finish()
        assert (arena.device_bytes, arena.host_bytes) == (0, sum(tensor.nbytes for tensor in tensors))
        swap.back()
        assert (arena.device_bytes, arena.host_bytes) == (sum(tensor.nbytes for tensor in tensors), 0)
        assert all(torch.equal(*pair) for pair in zip((*tensors, shared), wanted, strict=True))


def test_an_engine_says_why_it_takes_no_layer(tmp_path):
    with engine_of(ARCHS["qwen3_moe"]) as (url, turns, model):
        engines = ColocatedEngines([url], {}, timeout_s=20.0, start_timeout_s=1.0, on_wait=lambda: None)
        memory = SharedMemory.create(1 << 12)
        assert turns.is_asleep
        assert turns.arena.device_bytes == 0
        with pytest.raises(HandoffError, match=r"409.*tensors were not loaded"):
            engines.wake(1)
        wrong = [SharedTensor("norm.weight", "float32", (3,), 0)]
        with pytest.raises(HandoffError, match=r"norm\.weight' has shape \(3,\), not"):
            engines.load(HandoverLayer(memory.path, wrong))
        with pytest.raises(HandoffError, match=r"'unheard\.of' is not part of this model"):
            engines.load(HandoverLayer(memory.path, [SharedTensor("unheard.of", "float32", (3,), 0)]))
        for path in ("/etc/passwd", f"/proc/{os.getpid()}/fd/0#0f", memory.path[:-4] + "0000", "/proc/1/../1/mem"):
            with pytest.raises(HandoffError, match=r"shared memory|not memory for layers|cannot be opened"):
                engines.load(HandoverLayer(path, wrong))
        for name, tensor in model_tensors(model).items():
            room = SharedMemory.create(tensor.numel() * 4)
            engines.load(HandoverLayer(room.path, [SharedTensor(name, "float32", tuple(tensor.shape), 0)]))
            room.close()
        assert engines.wake(1) == turns.arena.device_bytes > 0
        kept = engine_kept(turns)
        assert all(not tensor.any() for tensor in kept)
        for tensor in kept:
            # what the next owner of this memory may find in it
            tensor.fill_(float("nan"))
        with pytest.raises(HandoffError, match="call /sleep first"):
            engines.load(HandoverLayer(memory.path, wrong))
        assert engines.sleep() == 0
        assert turns.is_asleep
        assert memory_of(kept) == []
        memory.close()
        engines.close()
    with pytest.raises(PeerLostError, match="cannot be reached"):
        ColocatedEngines([url], {}, timeout_s=5.0, start_timeout_s=0.0, on_wait=lambda: None).sleep()


def test_the_loop_takes_turns_and_continues_from_a_checkpoint(tmp_path):
    model_dir = write_model_dir(tmp_path / "model")

    def recipe(steps, placement):
        plain = make_recipe(model_dir, steps=steps)
        return plain.model_copy(update={"engine": plain.engine.model_copy(update={"placement": placement})})

    def run_to(run, steps, placement, url):
        write_recipe(run, recipe(steps, placement))
        attempt = run.start_attempt()
        Endpoints(urls={"orchestrator": [dock.url], "engine": [url]}).write(run, attempt)
        train(RoleContext(run, attempt=attempt, role="trainer", replica=0, rank=0))

    dock, apart, turns = StubDock(), RunDir(tmp_path / "apart"), RunDir(tmp_path / "turns")
    with dock.serving():
        run_to(apart, 4, "apart", "")
        dock.published.clear()
        # two attempts, each with an engine that starts empty
        for steps in (2, 4):
            with engine_of(load_arch(model_dir)) as (url, _, served):
                run_to(turns, steps, "colocated", url)
                got = dict(published_tensors(served, served.adapter))
    assert dock.published == [1, 2, 3, 4]
    handoff = HandoffStore(apart.weights_dir).open(4)
    records = handoff.manifest.tensors
    assert got.keys() == records.keys()
    files = ModelFiles(handoff.path)
    with files:
        for name, tensor in got.items():
            wanted = torch.frombuffer(files.read(name, (0,) * tensor.dim(), tuple(tensor.shape)), dtype=torch.float32)
            assert torch.equal(wanted.view(tensor.shape), tensor), name
    phases = [record.phases_s["swap"] > 0 for record in read_metrics(turns)]
    assert phases == [True] * 4
    assert not turns.weights_dir.exists() or not list(turns.weights_dir.rglob("*.safetensors"))


def engine_kept(turns):
    return turns._engine.call(turns._engine._runner.kept_tensors).result()


def test_shared_memory_goes_with_its_processes():
    memory = SharedMemory.create(100)
    other = SharedMemory.open(memory.path)
    memory.data[3:6] = b"abc"
    assert other.data[3:6] == b"abc"
    path = memory.path
    memory.close()
    other.close()
    with pytest.raises(HandoffError, match="hint: colocated engines run on the trainer's node"):
        SharedMemory.open(path)

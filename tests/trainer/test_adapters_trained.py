"""Low-rank adapters: on every mesh as on one rank, of every family, saved alone, and published as engines merge."""

import msgspec
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_checkpoint import state_of, whole
from test_meshes import GRADIENT_TOLERANCE, MODELS, WEIGHT_TOLERANCE, save
from trainer_testing import Rollouts, make_recipe, run_ranks, write_model_dir

from hpcrl.checkpoints import CheckpointLedger
from hpcrl.config.lora import LoraConfig
from hpcrl.config.recipe import HandoffConfig
from hpcrl.errors import CheckpointError, UsageError
from hpcrl.inference.embedded.weights.updates import ReaderConfig, UpdateSession
from hpcrl.modeling.adapters import use_adapters
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.blocks import local_block, local_part
from hpcrl.modeling.hf import adapter_parameters, model_tensors, published_tensors
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.modeling.spec import build_model
from hpcrl.models.adapting import lora_parameters
from hpcrl.models.arch import load_arch
from hpcrl.trainer.batch.tensors import TokenBatch
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.publish.adapters import AdapterPublisher
from hpcrl.trainer.state.checkpoint import load_checkpoint
from hpcrl.trainer.state.export import export_checkpoint
from hpcrl.trainer.step.canary import CanaryMaker
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.format.canary import Canary, judge_canary
from hpcrl.weights.read.adapters import ADAPTER_CONFIG, ADAPTER_MODEL, CANARY
from hpcrl.weights.read.subscriber import ReaderSettings
from hpcrl.weights.store import HandoffStore

LORA = {"rank": 4, "alpha": 8.0}
SHARED = {**LORA, "experts": "shared_outer"}
STEPS = 3
#: of log-probabilities in float32, whose sums are made in another order
CANARY_TOLERANCE = 2e-5
#: family, mesh, adapters, and what else the trainer does
CASES = [
    ("qwen3_moe", {"ep": 2}, LORA, {}),
    ("qwen3_moe", {"ep": 2}, SHARED, {"activation_checkpointing": "full", "lm_head_chunk_tokens": 8}),
    ("qwen3_moe", {"cp": 2}, SHARED, {"activation_checkpointing": "selective"}),
    ("glm4_moe", {"ep": 2}, LORA, {"optimizer_offload": True}),
    ("glm_moe_dsa", {"cp": 2, "ep": 2}, LORA, {"parameter_offload": True}),
    ("nemotron_h", {"dp_replicate": 2}, SHARED, {}),
    ("qwen3_next", {"ep": 2}, LORA, {"activation_checkpointing": "full"}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    return {name: write_model_dir(root / name, arch) for name, arch in MODELS.items()}


def new_policy(model_dir, parallel, lora, memory=(), **trainer):
    recipe = make_recipe(model_dir, steps=9, lora=lora, memory=dict(memory), **trainer)
    return TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)


def train(policy):
    """Losses, norms, gradients of the second step (in the first B is zero, and A has none), adapters and base."""
    data, world = policy.parallel.data, policy.parallel.world
    losses, norms, gradients = [], [], {}
    for step in range(1, STEPS + 1):
        losses.append(policy.forward_backward(Rollouts(step).shard(data.rank, data.size)).reduce(world).loss)
        if step == 2:
            gradients = {n: whole(p.grad).tolist() for n, p in policy.model.named_parameters() if p.requires_grad}
        norms.append(policy.optimizer_step(step)[0])
    adapters = {n: whole(p).tolist() for n, p in adapter_parameters(policy.model).items()}
    return losses, norms, gradients, adapters, policy.base.tolist()


def scramble(policy, seed=3):
    """An adapter whose B is no longer zero, and the same on every mesh."""
    with torch.no_grad():
        for name, parameter in adapter_parameters(policy.model).items():
            if name.endswith("lora_B"):
                held = tuple(map(slice, *local_block(parameter)))
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) / 8
                local_part(parameter).copy_(drawn[held])


def canary_of(policy):
    """Of an adapter that changes something, however little was trained."""
    scramble(policy)
    canary = CanaryMaker(policy.recipe, policy.arch, policy.parallel)(policy.model, STEPS)
    return msgspec.json.decode(canary, type=Canary)


def make_publisher(policy, model_dir, root, **more):
    lora = policy.recipe.trainer.lora
    dtype = getattr(torch, policy.recipe.trainer.dtype)
    return AdapterPublisher(
        HandoffStore(root),
        policy.parallel,
        lora=lora,
        arch=policy.arch,
        model_dir=model_dir,
        dtype=dtype,
        attempt=1,
        settings=HandoffConfig(retry_s=0.0),
        chunk_bytes=4096,
        **more,
    )


def on_meshes(rank, models, root):
    results = []
    with distributed(timeout_s=60) as start:
        for number, (family, degrees, lora, memory) in enumerate(CASES):
            mesh = ParallelDims(world_size=2, **degrees)
            mesh.build_mesh("cpu")
            parallel = Parallel(mesh, start.device)
            policy = new_policy(models[family], parallel, lora, memory)
            first = {n: whole(p).tolist() for n, p in adapter_parameters(policy.model).items()}
            results.append((first, train(policy)))
            if number in (0, 1):
                save(policy, root / f"checkpoints-{number}")
                results[-1] += (state_of(policy),)
                publisher = make_publisher(policy, models[family], root / f"weights-{number}")
                publisher.publish(policy.model, STEPS)
                publisher.wait()
            results[-1] = (canary_of(policy), *results[-1])
    return results


@pytest.mark.slow
def test_every_mesh_trains_adapters_as_one_rank(tmp_path, models):
    """Expert, context and data parallelism, memory tools, both kinds of adapters of experts; then on one rank again."""
    ranks = run_ranks(2, on_meshes, models, tmp_path, timeout_s=120.0)
    with distributed(timeout_s=120) as parallel:
        for number, (family, _, lora, _) in enumerate(CASES):
            policy = new_policy(models[family], parallel, lora)
            first = {n: whole(p).tolist() for n, p in adapter_parameters(policy.model).items()}
            losses, norms, gradients, adapters, base = train(policy)
            assert all(norm > 0 for norm in norms)
            for rank in ranks:
                _, begun, found, *saved = rank[number]
                assert begun == first, "the same A is drawn on every mesh"
                assert found[4] == base, "the digest of the base does not depend on the mesh"
                assert found[0] == pytest.approx(losses, rel=1e-4, abs=1e-6), CASES[number]
                assert found[1] == pytest.approx(norms, rel=1e-4), CASES[number]
                for name in gradients:
                    pairs = ((2, gradients, GRADIENT_TOLERANCE), (3, adapters, WEIGHT_TOLERANCE))
                    for place, reference, tolerance in pairs:
                        ours, theirs = torch.tensor(found[place][name]), torch.tensor(reference[name])
                        torch.testing.assert_close(ours, theirs, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
            if number in (0, 1):
                entry = CheckpointLedger(tmp_path / f"checkpoints-{number}").newest_verified().entry
                load_checkpoint(entry, policy.model, policy.optimizer, parallel, base=policy.base)
                restored, saved = state_of(policy), ranks[0][number][3]
                assert restored == saved, [name for name in saved if restored[name] != saved[name]]
                check_merge(
                    policy, models[family], tmp_path / f"weights-{number}", entry, tmp_path / f"export-{number}"
                )
            check_canaries(canary_of(policy), [rank[number][0] for rank in ranks], CASES[number])


def check_canaries(wanted, found, case):
    """Engines are compared with the log-probabilities of one rank, whatever the mesh that made them."""
    assert min(wanted.plain) < max(wanted.plain) < 0
    assert max(abs(a - b) for a, b in zip(wanted.adapted, wanted.plain, strict=True)) > 0.05
    for canary in found:
        assert canary.token_ids == wanted.token_ids
        assert canary.plain == pytest.approx(wanted.plain, abs=CANARY_TOLERANCE), case
        assert canary.adapted == pytest.approx(wanted.adapted, abs=CANARY_TOLERANCE), case


def exchanged(updater, old):
    """Finish an update as an engine does that serves ``old``; the model with the new weights."""
    models = [old]

    def exchange(new, label):
        models.append(new)
        return old

    updater.finish(exchange)
    return models[-1]


def check_merge(policy, model_dir, root, entry, export):
    """What two ranks have published, merged by an engine, is the export of the checkpoint bit by bit."""
    engine = build_model(policy.arch, device="cpu").requires_grad_(requires_grad=False)
    updater = UpdateSession(engine, ReaderConfig(root, None, ReaderSettings()))
    updater.init()
    updater.start()
    handoff = HandoffStore(root).open(STEPS)
    assert handoff.manifest.files.keys() == {ADAPTER_MODEL, ADAPTER_CONFIG}
    assert updater.update({"path": str(handoff.path)}).kind == "lora"
    served = dict(published_tensors(exchanged(updater, engine), engine.adapter))
    export_checkpoint(entry, model_dir, export, dtype="float32", recipe=policy.recipe)
    exported = {name: t for file in export.glob("*.safetensors") for name, t in load_file(file).items()}
    start = load_file(model_dir / "model.safetensors")
    assert served.keys() == exported.keys() == start.keys()
    assert all(torch.equal(served[name], exported[name]) for name in served)
    moved = {name for name in start if not torch.equal(start[name], exported[name])}
    assert moved == {
        name
        for name in start
        if any(part in name for part in ("self_attn.q_proj", "k_proj", "v_proj"))
        or "o_proj" in name
        or ".experts." in name
    }


@pytest.mark.parametrize("family", MODELS)
def test_each_family_is_the_model_with_the_products_added(models, family):
    """Numbers of adapters are those of the planner, and the sum of weights and products computes the same."""
    arch, model_dir = MODELS[family], models[family]
    for experts in ("per_expert", "shared_outer"):
        lora = LoraConfig(rank=4, alpha=8.0, experts=experts)
        with distributed(timeout_s=120) as parallel:
            policy = new_policy(model_dir, parallel, lora.model_dump())
            trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
            numbers = sum(parameter.numel() for parameter in trained)
            assert numbers == lora_parameters(arch.facts, 4, None, shared_outer=experts == "shared_outer")
            assert len(policy.optimizer.param_groups[0]["params"]) == len(trained)
            batch = TokenBatch.from_wire(Rollouts(1).shard(0, 1).micro_batches[0], arch)

            def logits(policy=policy, batch=batch):
                with torch.no_grad():
                    return policy.model(batch.input_ids, batch.context())

            plain = logits()
            scramble(policy)
            adapted = logits()
            with use_adapters(policy.model, "merged"):
                merged = logits()
            with use_adapters(policy.model, "off"):
                assert torch.equal(logits(), plain), "B begins with zeros, and off is the base"
            assert (adapted - plain).abs().mean() > 20 * (adapted - merged).abs().mean()
            torch.testing.assert_close(adapted, merged, rtol=1e-3, atol=1e-3)


def test_what_a_family_lacks_is_refused(models):
    with distributed(timeout_s=120) as parallel:
        for family, targets, message in (
            ("gpt_oss", ["experts"], "no adapters for the experts of gpt_oss, one tensor with gates and ups in turn"),
            ("qwen3_moe", ["mlp"], "qwen3_moe has no mlp; it has attention, experts"),
            ("qwen3_moe", [], "names nothing that is trained"),
        ):
            with pytest.raises(UsageError) as caught:
                new_policy(models[family], parallel, {**LORA, "targets": targets})
            assert message in str(caught.value)
            assert "hint:" in str(caught.value)


def test_targets_leave_the_others_alone(models):
    with distributed(timeout_s=120) as parallel:
        policy = new_policy(models["glm4_moe"], parallel, {**LORA, "targets": ["mlp", "shared_experts"]})
        names = {name.rpartition(".")[0] for name in adapter_parameters(policy.model)}
        leaves = ("gate_proj", "up_proj", "down_proj")
        assert names == {f"layers.0.mlp.{leaf}" for leaf in leaves} | {
            f"layers.1.mlp.shared_experts.{leaf}" for leaf in leaves
        }
        before = {name: whole(tensor) for name, tensor in model_tensors(policy.model).items()}
        train(policy)
        assert all(torch.equal(before[name], whole(tensor)) for name, tensor in model_tensors(policy.model).items())


def test_a_base_in_bfloat16_is_held_in_bfloat16(models):
    """Beside adapters, their moments and gradients in float32; the loss falls."""
    with distributed(timeout_s=120) as parallel:
        policy = new_policy(models["qwen3_moe"], parallel, {"rank": 8, "alpha": 16.0}, dtype="bfloat16")
        assert {p.dtype for p in model_tensors(policy.model).values()} == {torch.bfloat16}
        assert {p.dtype for p in adapter_parameters(policy.model).values()} == {torch.float32}
        losses = []
        for step in range(1, 5):
            losses.append(policy.forward_backward(Rollouts(1).shard(0, 1)).reduce(parallel.world).loss)
            policy.optimizer_step(step)
        assert losses[-1] < losses[0]


def test_a_checkpoint_knows_what_it_was_trained_on(models, tmp_path):
    """Another start model, another scale, or weights in place of adapters are refused; the entry has no weight."""
    model_dir = models["qwen3_moe"]
    with distributed(timeout_s=120) as parallel:
        policy = new_policy(model_dir, parallel, LORA)
        train(policy)
        save(policy, tmp_path / "checkpoints")
        entry = CheckpointLedger(tmp_path / "checkpoints").newest_verified().entry
        size = sum(file.stat().st_size for file in entry.trainer_dir.iterdir())
        assert size < 0.9 * sum(parameter.numel() * 12 for parameter in policy.model.parameters())
        other = tmp_path / "other"
        other.mkdir()
        for file in model_dir.iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        tensors = load_file(other / "model.safetensors")
        # one bit of one number
        tensors["model.layers.1.mlp.gate.weight"].view(torch.int32)[3, 5] ^= 1
        save_file(tensors, other / "model.safetensors")
        for directory, lora, message in (
            (other, LORA, "trained on other weights than those of the start model"),
            (model_dir, {**LORA, "alpha": 4.0}, "had the scale 2, and now have 1"),
        ):
            now = new_policy(directory, parallel, lora)
            with pytest.raises(CheckpointError, match=message):
                load_checkpoint(entry, now.model, now.optimizer, parallel, base=now.base)
        full = TrainerPolicy(make_recipe(model_dir, steps=9), load_arch(model_dir), parallel, model_dir=model_dir)
        with pytest.raises(CheckpointError, match="holds adapters, and weights are trained"):
            load_checkpoint(entry, full.model, full.optimizer, parallel)


@pytest.mark.parametrize("lora", [LORA, SHARED], ids=["per_expert", "shared_outer"])
def test_an_export_is_the_start_model_with_the_products_added(models, tmp_path, lora):
    model_dir = models["qwen3_moe"]
    with distributed(timeout_s=120) as parallel:
        policy = new_policy(model_dir, parallel, lora)
        scramble(policy)
        save(policy, tmp_path / "checkpoints")
        publisher = make_publisher(policy, model_dir, tmp_path / "weights")
        publisher.publish(policy.model, 1)
        publisher.wait()
        recipe = policy.recipe
    entry = CheckpointLedger(tmp_path / "checkpoints").newest_verified().entry
    for without in (None, make_recipe(model_dir, steps=1)):
        with pytest.raises(CheckpointError, match="holds adapters, and the recipe of the run has none"):
            export_checkpoint(entry, model_dir, tmp_path / "export", dtype="float32", recipe=without)
    export_checkpoint(entry, model_dir, tmp_path / "export", dtype="float32", recipe=recipe)
    start, adapter = (
        load_file(model_dir / "model.safetensors"),
        load_file(HandoffStore(tmp_path / "weights").path_of(1) / ADAPTER_MODEL),
    )
    exported = {n: t for file in (tmp_path / "export").glob("*.safetensors") for n, t in load_file(file).items()}
    assert exported.keys() == start.keys()
    changed = 0
    for name, tensor in start.items():
        a, b = (adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{own}.weight") for own in "AB")
        wanted = tensor if a is None else tensor + lora["alpha"] / lora["rank"] * b.float() @ a.float()
        changed += a is not None and not torch.equal(wanted, tensor)
        torch.testing.assert_close(exported[name], wanted, rtol=1e-5, atol=1e-6)
    assert changed == len(adapter) // 2 > 0


def test_the_canary_tells_engines_with_the_adapter_from_others(models, tmp_path):
    """The trainer's numbers of a version in bfloat16, and those of models that have merged it, dropped or mixed it."""
    model_dir = models["glm4_moe"]
    arch = load_arch(model_dir)
    with distributed(timeout_s=120) as parallel:
        policy = new_policy(model_dir, parallel, {"rank": 8, "alpha": 16.0}, dtype="bfloat16")
        scramble(policy)
        root = tmp_path / "weights"
        publisher = make_publisher(policy, model_dir, root, canary=CanaryMaker(policy.recipe, arch, parallel))
        publisher.publish(policy.model, 1)
        publisher.wait()
    store = HandoffStore(root)
    assert store.versions() == [0, 1]
    canary = msgspec.json.decode((store.path_of(1) / CANARY).read_bytes(), type=Canary)
    tokens = torch.tensor(canary.token_ids)

    def logprobs(model):
        with torch.no_grad():
            context = PackedAttention(torch.tensor([0, len(tokens)])).context(torch.arange(len(tokens) - 1))
            scores = model(tokens, context).log_softmax(-1)
        return scores.gather(1, tokens[1:, None])[:, 0].tolist()

    engine = build_model(arch, device="cpu", dtype=torch.bfloat16).requires_grad_(requires_grad=False)
    updater = UpdateSession(engine, ReaderConfig(root, None, ReaderSettings()))
    updater.init()
    served = []
    for version in (0, 1):
        updater.start()
        updater.update({"path": str(store.path_of(version))})
        engine = model = exchanged(updater, engine)
        served.append(logprobs(model))
    plain, adapted = served
    assert judge_canary(canary, adapted, plain).outcome == judge_canary(canary, adapted).outcome == "applied"
    assert judge_canary(canary, plain, plain).outcome == judge_canary(canary, plain).outcome == "ignored"
    # experts in another order, as a layout that is misread would have them
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.down_proj", "o_proj.weight")):
            parameter.copy_(parameter.flip(0))
    assert judge_canary(canary, logprobs(model), plain).outcome == "ignored"


def test_every_version_has_a_canary(models):
    """An engine may be started anew at any version, and the first that it loads is the one to compare."""
    with distributed(timeout_s=120) as parallel:
        policy = new_policy(models["qwen3_moe"], parallel, LORA)
        canary = CanaryMaker(policy.recipe, policy.arch, parallel)
        assert all(canary(policy.model, version) is not None for version in range(1, 13))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3_moe", ["attention"]),
        ("qwen3_moe", ["attention", "experts"]),
        ("qwen2", None),
        ("llama", ["attention", "mlp"]),
        ("mistral", ["mlp"]),
        ("qwen3", None),
    ],
)
def test_peft_reads_a_version_as_it_is(models, tmp_path, family, targets):
    """And gives the trainer's log-probabilities, without it and with it."""
    model_dir = models[family]
    with distributed(timeout_s=120) as parallel:
        policy = new_policy(model_dir, parallel, {**LORA, "targets": targets})
        scramble(policy)
        canary = CanaryMaker(policy.recipe, policy.arch, parallel)
        publisher = make_publisher(policy, model_dir, tmp_path / "weights", canary=canary)
        publisher.publish(policy.model, 1)
        publisher.wait()
    path = HandoffStore(tmp_path / "weights").path_of(1)
    wanted = msgspec.json.decode((path / CANARY).read_bytes(), type=Canary)
    tokens = torch.tensor(wanted.token_ids)

    def difference(model, logprobs):
        with torch.no_grad():
            scores = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        return float((scores.gather(1, tokens[1:, None])[:, 0] - torch.tensor(logprobs)).abs().max())

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert difference(model, wanted.plain) < 1e-4
    adapted = peft.PeftModel.from_pretrained(model, path)
    assert difference(adapted, wanted.adapted) < 1e-4
    assert difference(adapted, wanted.plain) > 0.01


def test_versions_of_earlier_trainers_are_read(models, tmp_path, monkeypatch):
    """Their tensors lie in shards with the names of a model's."""
    model_dir = models["qwen3_moe"]
    with distributed(timeout_s=120) as parallel:
        policy = new_policy(model_dir, parallel, LORA)
        scramble(policy)
        publisher = make_publisher(policy, model_dir, tmp_path)
        monkeypatch.setattr(publisher, "_only_file", None)
        publisher.publish(policy.model, 1)
        publisher.wait()
        publisher = make_publisher(policy, model_dir, tmp_path)
        publisher.publish(policy.model, 2)
        publisher.wait()
    store = HandoffStore(tmp_path)
    assert "model-00001-of-00001.safetensors" in store.open(1).manifest.files
    served = []
    for version in (1, 2):
        engine = build_model(policy.arch, device="cpu").requires_grad_(requires_grad=False)
        updater = UpdateSession(engine, ReaderConfig(tmp_path, None, ReaderSettings()))
        updater.init()
        updater.start()
        updater.update({"path": str(store.path_of(version))})
        served.append(dict(published_tensors(exchanged(updater, engine), engine.adapter)))
    assert all(torch.equal(served[0][name], served[1][name]) for name in served[0])

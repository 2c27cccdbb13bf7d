"""A trainer in block FP8: the weights that versions in FP8 have, on all families, on ranks and with memory tools."""

import json
from dataclasses import replace

import pytest
import torch
from test_context_parallel import DENSE
from test_meshes import ARCHS, MODELS
from test_publish_kinds import make_publisher
from trainer_testing import Rollouts, gradient_distance, make_recipe, run_ranks, write_model_dir

from hpcrl.errors import UsageError
from hpcrl.modeling.fp8 import find_fp8
from hpcrl.modeling.fp8.backends import Reference
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import Parallel, distributed
from hpcrl.trainer.precision import quantised_modules
from hpcrl.trainer.step import policy as policies
from hpcrl.trainer.step.policy import TrainerPolicy
from hpcrl.weights.format.quantise import FP8_DTYPE
from hpcrl.weights.read.reconstruct import read_tensors
from hpcrl.weights.store import HandoffStore

#: parts of an expert's matrix that are no whole blocks; gpt-oss publishes its experts as one tensor
WIDE = {"moe_intermediate_size": 136, "hidden_size": 160}
FAMILIES = {**MODELS, "qwen3_moe": replace(ARCHS["qwen3_moe"], **WIDE), "qwen3": DENSE}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: write_model_dir(root / family, arch, change=soften) for family, arch in FAMILIES.items()}


def soften(model):
    """Small weights: else a choice of experts that falls the other way is most of the difference."""
    model.init_weights(torch.Generator().manual_seed(0), std=0.05)


def make_policy(model_dir, parallel, fp8, **trainer):
    recipe = make_recipe(model_dir, steps=9, precision={"fp8": fp8}, **{"dtype": "bfloat16", **trainer})
    return TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)


def fp8_of(family, **settings):
    return settings if family != "gpt_oss" else {"experts": False, **settings}


def computed(policy):
    """The loss of a batch and its gradients; nothing is updated."""
    data = policy.parallel.data
    loss = policy.forward_backward(Rollouts(1).shard(data.rank, data.size)).reduce(policy.parallel.world).loss
    trained = [(n, p) for n, p in policy.model.named_parameters() if p.requires_grad]
    found = {n: p.grad.full_tensor().clone() for n, p in trained}
    policy.optimizer.zero_grad()
    return loss, found


class Watched(Reference):
    """Remembers the weights that are multiplied with, by their bytes."""

    name = "watched"

    def __init__(self):
        self.seen = set()

    def note(self, blocks):
        for scales, values in zip(blocks.scales.reshape(-1), tiles(blocks.values), strict=True):
            self.seen.add((float(scales), values))

    def multiply(self, a, b, dtype):
        self.note(b)
        return super().multiply(a, b, dtype)

    def multiply_groups(self, a, b, groups, dtype):
        self.note(b)
        return super().multiply_groups(a, b, groups, dtype)


def tiles(values):
    """Blocks of 128 x 128 in the order of their scales, as bytes."""
    shape = (*values.shape[:-2], values.shape[-2] // 128, 128, values.shape[-1] // 128, 128)
    cut = values.view(torch.uint8).view(shape).transpose(-3, -2)
    return [bytes(tile.numpy().tobytes()) for tile in cut.reshape(-1, 128, 128)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_forward_pass_multiplies_with_the_bits_of_the_version(models, family, tmp_path, monkeypatch):
    backend = Watched()
    monkeypatch.setattr(find_fp8, "Reference", lambda: backend)
    settings = fp8_of(family, keep=["*.o_proj"])
    with distributed(timeout_s=60) as parallel:
        policy = make_policy(models[family], parallel, settings)
        with torch.no_grad():
            # a block of zeros, and one below the floor of scales
            for parameter in policy.model.parameters():
                parameter.to_local()[: len(parameter.to_local()) // 2].mul_(1e-6)
        computed(policy)
        told = {"quantised": quantised_modules(policy.recipe.trainer.precision.fp8)}
        publisher = make_publisher(tmp_path, parallel, models[family], kind="fp8", told=told)
        publisher.publish(policy.model, 1)
        publisher.wait()
        publisher.close()
    tensors = {t.name: t for t in read_tensors(HandoffStore(tmp_path), 1)}
    published = [name for name, t in tensors.items() if t.record.dtype == FP8_DTYPE]
    # vLLM and the indexer's choice of GLM-5 use these rounded, and multiply in another way
    absorbed = [name for name in published if family == "glm_moe_dsa" and "kv_b_proj" in name]
    missed = []
    for name in set(published) - set(absorbed):
        rows, columns = tensors[name].record.shape
        values = torch.frombuffer(bytearray(tensors[name].data), dtype=torch.uint8).view(rows, columns)
        whole = torch.nn.functional.pad(values, (0, -columns % 128, 0, -rows % 128))
        scales = torch.frombuffer(bytearray(tensors[f"{name}_scale_inv"].data), dtype=torch.float32)
        if not backend.seen.issuperset(zip(scales.tolist(), tiles(whole), strict=True)):
            missed.append(name)
    assert published
    assert missed == []
    kept = json.loads((HandoffStore(tmp_path).path_of(1) / "config.json").read_text())["quantization_config"]
    assert not [name for name in published if name.removesuffix(".weight") in kept["modules_to_not_convert"]]
    assert [name for name in kept["modules_to_not_convert"] if name.endswith("o_proj")]


@pytest.mark.parametrize("family", FAMILIES)
def test_near_what_float32_computes(models, family):
    with distributed(timeout_s=60) as parallel:
        plain_loss, plain = computed(make_policy(models[family], parallel, None, dtype="float32"))
        policy = make_policy(models[family], parallel, fp8_of(family), dtype="float32")
        loss, found = computed(policy)
        # other experts and tokens are chosen where two are nearly equal
        assert loss == pytest.approx(plain_loss, abs=0.02)
        assert 0.001 < gradient_distance(found, plain) < 0.25
        policy.forward_backward(Rollouts(1).shard())
        assert all(map(torch.isfinite, torch.tensor(policy.optimizer_step(1))))


TOOLS = {
    "computed again": {"activation_checkpointing": "full", "activation_offload": True},
    "selective": {"activation_checkpointing": "selective"},
    "optimizer on the host": {"optimizer_offload": True},
    "parameters on the host": {"parameter_offload": True},
}


def test_memory_tools_change_no_bit(models):
    for family in ("qwen3_moe", "glm_moe_dsa"):
        with distributed(timeout_s=60) as parallel:
            loss, wanted = computed(make_policy(models[family], parallel, {}))
            for name, memory in TOOLS.items():
                found = computed(make_policy(models[family], parallel, {}, memory=memory))
                assert found[0] == loss, name
                assert [n for n in wanted if not torch.equal(found[1][n], wanted[n])] == [], name
            found = computed(make_policy(models[family], parallel, {}, memory={"lm_head_chunk_tokens": 3}))
            assert gradient_distance(found[1], wanted) < 0.02


def on_a_mesh(rank, model_dir, degrees, trainer):
    with distributed(timeout_s=60) as start:
        mesh = ParallelDims(world_size=start.world.size, **degrees)
        mesh.build_mesh("cpu")
        loss, found = computed(make_policy(model_dir, Parallel(mesh, start.device), {}, dtype="float32", **trainer))
        return loss, {name: tensor.numpy() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("family", "degrees"), [("qwen3_moe", {"ep": 2}), ("glm_moe_dsa", {"ep": 2, "cp": 2}), ("nemotron_h", {"ep": 2})]
)
def test_two_ranks_compute_what_one_does(models, family, degrees):
    """Rows are quantised by themselves, so losses are equal; tokens of a weight's gradient share scales otherwise."""
    parallelism = {"ep": degrees.get("ep", 1), "cp": degrees.get("cp", 1)}
    with distributed(timeout_s=60) as parallel:
        loss, wanted = computed(make_policy(models[family], parallel, {}, dtype="float32"))
    trainer = {"ranks": 2, "parallelism": parallelism}
    for found_loss, found in run_ranks(2, on_a_mesh, models[family], degrees, trainer):
        assert found_loss == pytest.approx(loss, abs=1e-4)
        assert gradient_distance({name: torch.from_numpy(value) for name, value in found.items()}, wanted) < 0.08


def test_what_keeps_nothing_is_an_error(models):
    with distributed(timeout_s=60) as parallel:
        with pytest.raises(UsageError, match=r"(?s)keep: 'lm_head' keeps nothing.*hint"):
            make_policy(models["qwen3_moe"], parallel, {"keep": ["lm_head"]})
        with pytest.raises(UsageError, match=r"(?s)not all of the 24 matrices.*hint: give a pattern of all"):
            make_policy(models["qwen3_moe"], parallel, {"keep": ["*.experts.3.up_proj"]})
        with pytest.raises(UsageError, match=r"(?s)experts of a layer are published as one tensor.*experts: false"):
            make_policy(models["gpt_oss"], parallel, {})
        with pytest.raises(UsageError, match="nothing is left"):
            make_policy(models["qwen3_moe"], parallel, {"linears": False, "experts": False})
        with pytest.raises(UsageError, match=r"(?s)deep_gemm: .*computes on cpu.*hint"):
            make_policy(models["qwen3_moe"], parallel, {"backend": "deep_gemm"})


def test_products_are_tried_once_at_the_start(models, monkeypatch):
    """A trial on a GPU compiles and multiplies for seconds."""
    asked = []

    def find(config, device):
        asked.append((config, device))
        return Reference()

    monkeypatch.setattr(policies, "find_precision", find)
    with distributed(timeout_s=60) as parallel:
        made = make_policy(models["qwen3"], parallel, {})
    assert len(asked) == 1
    assert made.kernels["fp8"] == "reference"

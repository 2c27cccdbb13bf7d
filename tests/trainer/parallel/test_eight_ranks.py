"""Eight ranks: losses, gradients and weights as of one, with experts, sparse attention, a ring and copies."""

import pytest
from test_context_parallel import assert_alike, new_policy
from test_meshes import ARCHS, train
from trainer_testing import run_ranks, write_model_dir

from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.trainer.parallel.mesh import Parallel, distributed

RANKS = 8
CASES = [
    ("qwen3_moe", {"ep": 8}, "ulysses"),
    ("qwen3_moe", {"dp_replicate": 2, "cp": 2, "ep": 2}, "ring"),
    ("deepseek_v3", {"cp": 8, "ep": 2}, "ring"),
    ("glm_moe_dsa", {"cp": 8, "ep": 4}, "ulysses"),
    ("glm_moe_dsa", {"dp_replicate": 2, "cp": 2, "ep": 4}, "ulysses"),
]


def on_ranks(rank, models):
    results = []
    with distributed(timeout_s=240) as start:
        for family, degrees, scheme in CASES:
            mesh = ParallelDims(world_size=RANKS, **degrees)
            mesh.build_mesh("cpu")
            policy = new_policy(models[family], Parallel(mesh, start.device), scheme, "masked_ratio")
            results.append(train(policy))
    return results


@pytest.mark.campaign
def test_eight_ranks_train_as_one(tmp_path):
    models = {name: write_model_dir(tmp_path / name, ARCHS[name]) for name in {case[0] for case in CASES}}
    ranks = run_ranks(RANKS, on_ranks, models, timeout_s=500.0)
    with distributed(timeout_s=120) as parallel:
        wanted = {name: train(new_policy(path, parallel, "ulysses", "masked_ratio")) for name, path in models.items()}
    for number, case in enumerate(CASES):
        for rank in ranks:
            assert_alike(rank[number], wanted[case[0]], case)

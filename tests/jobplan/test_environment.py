"""The environment of roles: where compilers keep what they compile, and what the profile says in spite of it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.cluster import CLUSTER_KINDS
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.jobplan import role_variables
from hpcrl.supervisor.process.node_values import own_caches

#: from the sources of each: torch 2.13, Triton 3.7, vLLM 0.32, DeepGEMM 2.6.1 (jit/compiler.hpp), DeepEP 2.1.0
#: (csrc/jit/compiler.hpp), FlashInfer (jit/env.py), apache-tvm-ffi 0.1 (cpp/extension.py), CUTLASS 4.3, TileLang
VARIABLES = {
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "QUACK_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "DG_JIT_CACHE_DIR",
    "EP_JIT_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "TVM_FFI_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "NUMBA_CACHE_DIR",
    "CUDA_CACHE_PATH",
}


def variables(role: Role, **profile: Any) -> dict[str, str]:
    data = load_cluster("h200-28").value.model_dump() | profile
    cluster = CLUSTER_KINDS["slurm"].model_validate(data)
    found = role_variables(load_recipe("glm5_swe", []).value, cluster, role, "night")
    return {name: value for name, (value, _) in found.items()}


@pytest.mark.parametrize("role", [Role.TRAINER, Role.PREFILL, Role.DECODE, Role.ORCHESTRATOR])
def test_nothing_is_compiled_into_the_home_directory(role: Role) -> None:
    found = variables(role)
    places = [Path(found[name]) for name in VARIABLES]
    assert all(place.is_relative_to("/scratch/hpcrl-night") for place in places)
    # none is in another one
    assert len({place.relative_to("/scratch/hpcrl-night").parts[0] for place in places}) == len(VARIABLES)


def test_the_profile_has_the_last_word() -> None:
    own = {"DG_JIT_CACHE_DIR": "/nvme/deep_gemm"}
    assert variables(Role.TRAINER, env=own)["DG_JIT_CACHE_DIR"] == "/nvme/deep_gemm"
    paths = {"runs_root": "/shared/runs"}
    assert not VARIABLES & variables(Role.TRAINER, paths=paths, env={}, env_by_role={}).keys()


def test_memory_of_trainers_on_gpus_is_expandable_unless_the_profile_says_otherwise() -> None:
    name, own = "PYTORCH_CUDA_ALLOC_CONF", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    assert variables(Role.TRAINER, env_by_role={})[name] == "expandable_segments:True"
    assert variables(Role.TRAINER, env=own, env_by_role={})[name] == own[name]
    # what engines exchange KV blocks in is registered, and must stay where it is
    assert not {name} & {*variables(Role.PREFILL, env_by_role={}), *variables(Role.ORCHESTRATOR, env_by_role={})}


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_a_guard_makes_each_cache_private(name: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o755)
    own_caches({name: f"{disk}/hpcrl-night/place"}, str(disk))
    assert stat.S_IMODE((disk / "hpcrl-night").stat().st_mode) == 0o700

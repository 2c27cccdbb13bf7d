"""Activations of a trainer as its model makes them, from `hpcrl.trainer.estimate` in a process with torch."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe, TrainerParallelismConfig
from hpcrl.errors import MissingExtraError, UsageError
from hpcrl.models.arch import arch_from_config
from hpcrl.models.known import find_config
from hpcrl.planning.hardware import node_hardware
from hpcrl.planning.memory.settings import RealPass
from hpcrl.processes.interpreter import module_command

_LIMIT_S = 600.0
_UNSEEN = ("activation_offload", "optimizer_offload", "parameter_offload")
"""Settings of ``trainer.memory`` that the estimate does not know."""


def measure_pass(recipe: Recipe, cluster: ClusterProfile) -> RealPass:
    """Return the pass of a micro-batch of one full sequence through the recipe's model, on tensors without storage.

    Raises
    ------
    UsageError
        The trainer does not support this model, or the recipe's settings for it; or the measurement failed.
    MissingExtraError
        This Python has no torch.
    """
    if isinstance(cluster, SlurmCluster) and node_hardware(cluster, Role.TRAINER).gpus:
        raise UsageError(
            "--real-model measures the trainer as it runs on processors; this one has GPUs\n"
            "    hint: without it, formulas tell what a trainer on GPUs takes"
        )
    unseen = ["trainer.parallelism"] if recipe.trainer.parallelism != TrainerParallelismConfig() else []
    unseen += [f"trainer.memory.{name}" for name in _UNSEEN if getattr(recipe.trainer.memory, name)]
    unseen += ["trainer.lora"] if recipe.trainer.lora is not None else []
    unseen += ["trainer.precision.fp8"] if recipe.trainer.precision.fp8 is not None else []
    if unseen:
        raise UsageError(
            f"--real-model measures the model alone on each rank, without what {' and '.join(unseen)} asks for\n"
            "    hint: without it, formulas tell what that takes"
        )
    if find_spec("torch") is None:
        raise MissingExtraError("trainer", "torch")
    try:
        config = json.loads(find_config(recipe.model.path).read_text(encoding="utf-8-sig"))
        arch_from_config(config)
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise UsageError(f"--real-model, {recipe.model.path}: {error}") from error
    asked = {
        "config": config,
        "lengths": [recipe.trainer.micro_batch_tokens],
        "dtype": recipe.trainer.dtype,
        "memory": recipe.trainer.memory.model_dump(),
        "loss_of_rollouts": recipe.algorithm.loss.is_of_rollouts,
    }
    command = module_command(sys.executable, "hpcrl.trainer.estimate")
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"--real-model: nothing was measured within {_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"--real-model: {last}\n    hint: without it, formulas tell what the model takes")
    found = json.loads(done.stdout)
    return RealPass(found["head"], found["whole"])

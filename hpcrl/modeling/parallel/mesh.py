"""The dimensions that ranks of a trainer are laid out in, and the meshes that follow from them.

The interface has the shape of torchtitan's ``ParallelDims``; docs/training.md says why it is not torchtitan's own.
"""

from __future__ import annotations

import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class ParallelDims:
    """``dp_replicate × dp_shard × cp`` ranks, of which ``ep`` neighbours share the experts.

    Rank 0 is first in every dimension, and later dimensions are inner ones: ranks of one context-parallel group, and
    of one expert-parallel group, are neighbours. Three views of the same ranks have meshes:

    - **data**: ``batch`` (``dp_replicate · dp_shard``, each with tokens of its own) × ``cp`` (share a batch);
    - **dense**: ``dp_replicate`` (have copies) × ``fsdp`` (``dp_shard · cp``, each with a shard of all parameters but
      experts);
    - **sparse**: ``dp_replicate`` × ``efsdp`` × ``ep``: experts are distributed over ``ep`` and sharded again over
      ``efsdp``; ``efsdp · ep`` are the ranks of ``fsdp``.
    """

    def __init__(self, *, world_size: int, dp_replicate: int = 1, cp: int = 1, ep: int = 1) -> None:
        """Choose dimensions; ``dp_shard`` is what the others leave of ``world_size``.

        Raises
        ------
        ValueError
            The degrees do not divide the ranks.
        """
        for name, degree in (("dp_replicate", dp_replicate), ("cp", cp), ("ep", ep)):
            if degree < 1:
                raise ValueError(f"{name} is {degree}; the least is 1")
        if world_size % (dp_replicate * cp):
            raise ValueError(f"dp_replicate {dp_replicate} times cp {cp} does not divide {world_size} ranks")
        self.world_size, self.dp_replicate, self.cp, self.ep = world_size, dp_replicate, cp, ep
        self.dp_shard = world_size // (dp_replicate * cp)
        if self.fsdp % ep:
            raise ValueError(f"ep {ep} does not divide the {self.fsdp} ranks that parameters are sharded over")
        self._meshes: dict[str, DeviceMesh] = {}

    @property
    def degrees(self) -> dict[str, int]:
        """Return the size of each dimension, by its name."""
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "cp": self.cp, "ep": self.ep}

    @property
    def batch(self) -> int:
        """Return the number of data-parallel ranks, between which batches are split."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Return the number of ranks over which parameters other than experts are sharded."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Return the number of ranks over which the experts of one expert-parallel rank are sharded."""
        return self.fsdp // self.ep

    def build_mesh(self, device_type: str) -> None:
        """Make the meshes and their groups: a collective of all ranks of the process group."""

        def build(**sizes: int) -> DeviceMesh:
            names, shape = tuple(sizes), tuple(sizes.values())
            assert math.prod(shape) == self.world_size, sizes
            return init_device_mesh(device_type, shape, mesh_dim_names=names)

        replicas = {"dp_replicate": self.dp_replicate} if self.dp_replicate > 1 else {}
        context = {"cp": self.cp} if self.cp > 1 else {}
        self._meshes = {
            "data": build(batch=self.batch, **context),
            "dense": build(**replicas, fsdp=self.fsdp),
        }
        if self.ep > 1:
            self._meshes["sparse"] = build(**replicas, efsdp=self.efsdp, ep=self.ep)

    def get_optional_mesh(self, *names: str) -> DeviceMesh | None:
        """Return the mesh of one or several dimensions of one view; None if one of them does not exist (has size 1).

        ``batch`` and ``fsdp`` always exist.
        """
        for mesh in self._meshes.values():
            dimensions = mesh.mesh_dim_names or ()
            if all(name in dimensions for name in names):
                return mesh if names == dimensions else mesh[names if len(names) > 1 else names[0]]
        return None

    def get_mesh(self, *names: str) -> DeviceMesh:
        """As `get_optional_mesh`; ValueError where there is none."""
        mesh = self.get_optional_mesh(*names)
        if mesh is None:
            raise ValueError(f"no mesh has {' and '.join(names)} in {self}")
        return mesh

    @property
    def sharding(self) -> DeviceMesh:
        """Return the mesh over which FSDP2 shards all parameters but experts: ``fsdp``, after any ``dp_replicate``."""
        return self._with_replicas("fsdp")

    @property
    def expert_sharding(self) -> DeviceMesh:
        """Return the mesh over which FSDP2 shards an expert-parallel rank's experts.

        Raises
        ------
        ValueError
            The mesh has no expert parallelism.
        """
        return self._with_replicas("efsdp")

    def _with_replicas(self, name: str) -> DeviceMesh:
        return self.get_mesh("dp_replicate", name) if self.dp_replicate > 1 else self.get_mesh(name)

    def __repr__(self) -> str:
        return (
            f"ParallelDims(dp_replicate={self.dp_replicate}, dp_shard={self.dp_shard}, cp={self.cp}, ep={self.ep}, "
            f"world_size={self.world_size})"
        )

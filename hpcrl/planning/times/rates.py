"""Rates that roles reach: numbers of the cluster profile times efficiencies of the calibration file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hpcrl.config.cluster import SlurmCluster
from hpcrl.models.facts import ModelFacts
from hpcrl.models.layers import Gqa
from hpcrl.planning.calibration.calibration_file import Calibration, EfficiencyName
from hpcrl.planning.collectives import Links, RankGroup, bytes_s
from hpcrl.planning.hardware import NodeHardware, filesystem_rate
from hpcrl.planning.tables.lookup import Matrix, Tables
from hpcrl.planning.times.shapes import SparseKernels

_GEMM: dict[str, EfficiencyName] = {"float32": "gemm_float32", "bfloat16": "gemm_bfloat16", "fp8": "gemm_fp8"}


@dataclass(frozen=True)
class Rates:
    """Rates of the nodes of one role, in operations and bytes a second.

    A rate is looked up on demand, so that a profile without, say, ``pcie_gb_s`` still gives every time that does not
    need it (`hpcrl.errors.ConfigError` names the missing number).
    """

    hardware: NodeHardware
    calibration: Calibration

    __hash__ = object.__hash__

    @property
    def gpus_per_node(self) -> int:
        """Return the GPUs of a node; 1 where it has none."""
        return max(1, self.hardware.gpus)

    @lru_cache(maxsize=64)  # noqa: B019 - a few rates objects live as long as the process plans
    def gemm(self, dtype: str, grouped: bool = False) -> float:
        """Return the rate of matrix products in ``dtype``; ``grouped``: many small ones, one an expert."""
        share = self.calibration.share(_GEMM[dtype]) * (self.calibration.share("grouped_gemm") if grouped else 1.0)
        return self.hardware.gpu_flops(dtype) * share

    @cached_property
    def tables(self) -> Tables:
        """Return the measured times of these GPUs."""
        return self.calibration.tables.for_device(self.hardware.node.gpu_type)

    def matrix_share(self, matrices: tuple[Matrix, ...], rows: float, dtype: str, kind: str) -> float:
        """Share of their roofline that matrix products reach together; 0 where their kind was not measured.

        Parameters
        ----------
        rows:
            Rows of each product.
        kind:
            ``gemm`` or ``grouped_gemm``.
        """
        if f"{kind}.{dtype}" not in self.tables.kinds or not matrices:
            return 0.0
        peak = self.hardware.gpu_flops(dtype), self.hardware.gpu_memory_rate
        return self.tables.matrix_share(kind, dtype, matrices, rows, peak)

    def attention_share(self, facts: ModelFacts, queries: float, context: float) -> float:
        """Share of its roofline that attention with grouped queries reaches; 0 where that was not measured."""
        mixers = [layer.mixer for layer in facts.layers if isinstance(layer.mixer, Gqa)]
        if "attention.bfloat16" not in self.tables.kinds or not mixers:
            return 0.0
        one = mixers[0]
        family = (one.num_attention_heads, one.num_key_value_heads, one.head_dim, queries)
        return self.tables.share("attention.bfloat16", family, context) or 0.0

    @cached_property
    def attention(self) -> float:
        """Return the rate of attention scores, in bfloat16."""
        return self.hardware.gpu_flops("bfloat16") * self.calibration.share("attention")

    def sparse_forward(self, kernels: SparseKernels) -> float:
        """Return the rate of a trainer's sparse attention in a forward pass, in bfloat16."""
        return self.hardware.gpu_flops("bfloat16") * self.sparse_shares(kernels)[0]

    def sparse_shares(self, kernels: SparseKernels) -> tuple[float, float]:
        """Return the shares of the bfloat16 peak that both reach, which need no number of the profile."""
        by_cudnn = kernels in {"flash_mla_cudnn", "libraries"}
        forward = self.calibration.share("sparse_attention" if kernels == "triton" else "attention")
        return forward, self.calibration.share("sparse_backward_cudnn" if by_cudnn else "sparse_backward")

    def index_scores(self, kernels: SparseKernels) -> float:
        """Return the rate of an indexer's scores in a trainer, whose own program multiplies in bfloat16."""
        if kernels == "libraries":
            return self.indexer
        return self.hardware.gpu_flops("bfloat16") * self.calibration.share("index_scores")

    @cached_property
    def index_choice(self) -> float:
        """Return the rate of choosing among a trainer's scores, in operations of these scores a second."""
        return self.hardware.gpu_flops("bfloat16") * self.calibration.share("index_choice")

    @cached_property
    def indexer(self) -> float:
        """Return the rate of scores of a sparse attention's indexer, in fp8."""
        return self.hardware.gpu_flops("fp8") * self.calibration.share("indexer")

    @cached_property
    def memory(self) -> float:
        """Return the rate of a GPU's memory."""
        return self.hardware.gpu_memory_rate * self.calibration.share("gpu_memory")

    @cached_property
    def pcie(self) -> float:
        """Return the rate between host and one GPU."""
        return self.hardware.pcie_rate * self.calibration.share("pcie")

    @cached_property
    def host_memory(self) -> float:
        """Return the rate of the host memory of a node."""
        return self.hardware.host_memory_rate * self.calibration.share("host_memory")

    @cached_property
    def node_network(self) -> float:
        """Return the rate of all adapters of a node."""
        return self.hardware.nic_rate * self.calibration.share("nic")

    @cached_property
    def collectives(self) -> Links:
        """Return the links of NCCL's all-gather and similar collectives."""
        return self._links("nvlink", "nic")

    @cached_property
    def all_to_all(self) -> Links:
        """Dispatch and combine of many tokens."""
        return self._links("all_to_all_nvlink", "all_to_all_nic")

    @cached_property
    def low_latency(self) -> Links:
        """Dispatch and combine of few tokens (decode)."""
        wait = self.calibration.constant("all_to_all_latency_s")
        links = self._links("all_to_all_nvlink", "low_latency_nic", "low_latency")
        return replace(links, hop_s=links.hop_s + wait, local_hop_s=links.local_hop_s + wait)

    def _links(self, nvlink: EfficiencyName, nic: EfficiencyName, dispatch: str = "all_to_all") -> Links:
        peak = Links(
            gpu=self.hardware.nvlink_rate,
            node=self.hardware.nic_rate,
            gpus_per_node=self.gpus_per_node,
            hop_s=0.0,
            local_hop_s=0.0,
        )
        hops = self.calibration.constant("hop_s"), self.calibration.constant("local_hop_s")

        def measured(kind: str, size: float, group: RankGroup) -> float | None:
            name = f"collectives.{dispatch if kind == 'all_to_all' else kind}"
            if name not in self.tables.kinds:
                return None
            share = self.tables.share(name, (group.size, group.nodes), size) or 1.0
            # measured times include their latency; smaller messages than these keep a growing part of it
            missing = max(0.0, 1.0 - size / self.tables.smallest(name))
            wait = self.calibration.constant("all_to_all_latency_s") if dispatch == "low_latency" else 0.0
            return bytes_s(kind, size, group, peak) / share + missing * (hops[group.nodes == 1] + wait)

        return Links(
            measured=measured,
            gpu=self.hardware.nvlink_rate * self.calibration.share(nvlink),
            node=self.hardware.nic_rate * self.calibration.share(nic),
            gpus_per_node=self.gpus_per_node,
            hop_s=self.calibration.constant("hop_s"),
            local_hop_s=self.calibration.constant("local_hop_s"),
        )


@dataclass(frozen=True)
class StorageRates:
    """The shared filesystem, in bytes a second."""

    cluster: SlurmCluster
    calibration: Calibration

    def read(self, nodes: int) -> float:
        """Return the rate of ``nodes`` nodes that read at the same time."""
        return min(self._rate("read_gb_s"), nodes * self._rate("node_read_gb_s"))

    def write(self, nodes: int) -> float:
        """Return the rate of ``nodes`` nodes that write at the same time."""
        return min(self._rate("write_gb_s"), nodes * self._rate("node_write_gb_s"))

    def _rate(self, key: str) -> float:
        return filesystem_rate(self.cluster, key) * self.calibration.share("filesystem")

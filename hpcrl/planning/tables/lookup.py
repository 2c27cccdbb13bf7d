"""From measured times to those of other shapes.

What is kept of a measured time is its share of a roofline: what the peak rates of the hardware would allow. Shares
change little between shapes, so they are interpolated, on logarithmic axes, and outside of what was measured the
nearest one stands. The time is the roofline of the asked shape over that share: it grows with the shape as it must.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from hpcrl.planning.collectives import Links, RankGroup, bytes_s
from hpcrl.planning.tables.file import AttentionSample, CollectiveSample, GemmSample, GroupedSample, TableFile

TableKind = str
"""``gemm``, ``grouped_gemm`` or ``attention`` with a type (``gemm.fp8``), or ``collectives`` with a kind."""

Matrix = tuple[float, float, float]
"""Products with equal matrices: width of the result, inner width, and how many there are of them."""

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1.0}
_NEIGHBOURS = 4
OWN, OTHER = 1.05, 1.15
"""Factor by which a measured time may be wrong: on the GPU that was measured, and on another one of the same chip."""


def gemm_roofline(shape: tuple[float, float, float], dtype: str, flops: float, memory: float) -> float:
    """Return the minimum seconds of a product of ``m x k`` and ``k x n``, from ``(m, n, k)``.

    Operations at their peak rate, or reading both and writing a result of two bytes an element (four in float32).
    """
    m, n, k = shape
    moved = (m * k + k * n) * _BYTES[dtype] + m * n * (4.0 if dtype == "float32" else 2.0)
    return max(2.0 * m * n * k / flops, moved / memory)


def attention_roofline(s: AttentionSample, flops: float, memory: float) -> float:
    """Return the minimum seconds of causal attention."""
    seen = s.context - (s.queries - 1) / 2
    operations = 4.0 * s.heads * s.head_dim * s.queries * seen
    moved = 2.0 * (s.context * s.kv_heads + s.queries * s.heads) * s.head_dim * _BYTES[s.dtype]
    return max(operations / flops, moved / memory)


@dataclass(frozen=True, eq=False)
class Curves:
    """Shares of rooflines: for each family of shapes, over one size that varies.

    Attributes
    ----------
    points:
        By family (sizes that belong together, such as n and k) the measured sizes in rising order with their shares.
    """

    points: Mapping[tuple[float, ...], tuple[tuple[float, float], ...]]

    @classmethod
    def of(cls, measured: Iterable[tuple[tuple[float, ...], float, float]]) -> Curves:
        """Return curves from families, sizes and shares; the largest share of a shape counts (the least disturbed)."""
        found: dict[tuple[float, ...], dict[float, float]] = {}
        for family, size, share in measured:
            own = found.setdefault(family, {})
            own[size] = max(share, own.get(size, 0.0))
        return cls({family: tuple(sorted(own.items())) for family, own in found.items()})

    @lru_cache(maxsize=1 << 16)  # noqa: B019 - a search asks for the same few shapes again and again
    def share(self, family: tuple[float, ...], size: float) -> float:
        """Return the share of its roofline that a shape reaches, interpolated along the size, then between families.

        All axes are logarithmic; outside the sizes of a family its nearest size is used. The nearest families are
        weighted by the inverse square of their distance (Shepard 1968).
        """
        near = self._nearest(family)
        if near[0][0] < 1e-9:
            return _along(self.points[near[0][1]], size)
        weights = [1.0 / distance**2 for distance, _ in near]
        logs = [math.log(_along(self.points[other], size)) for _, other in near]
        return math.exp(sum(w * x for w, x in zip(weights, logs, strict=True)) / sum(weights))

    @lru_cache(maxsize=1 << 10)  # noqa: B019 - as above
    def _nearest(self, family: tuple[float, ...]) -> list[tuple[float, tuple[float, ...]]]:
        """Return the measured families that are nearest to one, with their distances."""
        return sorted((_distance(family, other), other) for other in self.points)[:_NEIGHBOURS]

    def smallest(self) -> float:
        """Return the smallest size that was measured, of any family, in the unit of `share`."""
        return min(points[0][0] for points in self.points.values())


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    return math.sqrt(sum(math.log(x / y) ** 2 for x, y in zip(a, b, strict=True)))


def _along(points: Sequence[tuple[float, float]], size: float) -> float:
    """Interpolate between measured sizes on logarithmic axes; outside, return the value of the nearest one."""
    index = bisect_left(points, (size, 0.0))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (low, below), (high, above) = points[index - 1], points[index]
    part = math.log(size / low) / math.log(high / low)
    return math.exp(math.log(below) + part * math.log(above / below))


@dataclass(frozen=True)
class Tables:
    """The measured times that count for a GPU.

    Attributes
    ----------
    files:
        The last one that measured a kind of kernel counts for it.
    factors:
        Times that are taken as longer by a factor, by kind: how ranges are found.
    """

    files: tuple[TableFile, ...] = ()
    factors: Mapping[TableKind, float] = field(default_factory=dict)
    _found: dict[TableKind, Curves] = field(default_factory=dict, repr=False)
    """Curves of the files, read on demand."""
    _of_devices: dict[str, Tables] = field(default_factory=dict, repr=False)
    """Those of `for_device`, whose curves are the same whatever the factors are."""

    __hash__ = object.__hash__

    def for_device(self, gpu_type: str | None) -> Tables:
        """Give the tables that hold for a GPU, those of its own device last."""
        name = (gpu_type or "").lower()
        if name not in self._of_devices:
            other = [file for file in self.files if name and name in (chip.lower() for chip in file.same_chip)]
            own = [file for file in self.files if name and name == file.device.lower()]
            self._of_devices[name] = Tables((*other, *own))
        found = self._of_devices[name]
        return replace(found, factors=self.factors) if self.factors else found

    def moved(self, kind: TableKind, factor: float) -> Tables:
        """Return the tables with the times of one kind multiplied by ``factor``."""
        return replace(self, factors={**self.factors, kind: factor})

    @cached_property
    def kinds(self) -> Mapping[TableKind, TableFile]:
        """Return the measured kinds, each with the file that is used."""
        found: dict[TableKind, TableFile] = {}
        for file in self.files:
            for name in ("gemm", "grouped_gemm", "attention"):
                found |= {f"{name}.{sample.dtype}": file for sample in getattr(file, name)}
            found |= {f"collectives.{sample.kind}": file for sample in file.collectives}
        return found

    def factor(self, kind: TableKind) -> float:
        """Say by how much times of a kind may be wrong. A site's own file names no other chips, and is surest."""
        return OTHER if self.kinds[kind].same_chip else OWN

    def share(self, kind: TableKind, family: tuple[float, ...], size: float) -> float | None:
        """Share of the roofline that a kernel reaches; None where its kind was not measured."""
        if kind not in self.kinds:
            return None
        return self._curves(kind).share(family, size) / self.factors.get(kind, 1.0)

    @lru_cache(maxsize=1 << 14)  # noqa: B019 - as above
    def matrix_share(
        self, kind: str, dtype: str, matrices: tuple[Matrix, ...], rows: float, peak: tuple[float, float]
    ) -> float:
        """Share of their roofline that products of ``rows`` rows reach together, on a GPU with these peak rates of
        operations and of its memory (`Tables.share` of each by its part of the time)."""
        name, (flops, memory), least, taken = f"{kind}.{dtype}", peak, 0.0, 0.0
        for n, k, count in matrices:
            one = count * gemm_roofline((rows, n, k), dtype, flops, memory)
            least, taken = least + one, taken + one / (self.share(name, (n, k), rows) or 1.0)
        return least / taken

    def smallest(self, kind: TableKind) -> float:
        """Return the smallest measured size of a kind: rows of products, tokens of context, bytes of collectives."""
        return self._curves(kind).smallest()

    def _curves(self, kind: TableKind) -> Curves:
        if kind not in self._found:
            self._found[kind] = _curves(self.kinds[kind], *kind.split("."))
        return self._found[kind]


def _curves(file: TableFile, name: str, which: str) -> Curves:
    peak = file.hardware
    memory = peak.memory_gb_s * 1e9
    if name == "collectives":
        return Curves.of(_collective(s, file) for s in file.collectives if s.kind == which)
    flops = {str(key): value * 1e12 for key, value in peak.tflops.items()}[which]
    if name == "attention":
        return Curves.of(_attention(s, flops, memory) for s in file.attention if s.dtype == which)
    samples = file.gemm if name == "gemm" else file.grouped_gemm
    return Curves.of(_gemm(s, flops, memory) for s in samples if s.dtype == which)


_Point = tuple[tuple[float, ...], float, float]


def _gemm(sample: GemmSample, flops: float, memory: float) -> _Point:
    groups = sample.groups if isinstance(sample, GroupedSample) else 1
    least = groups * gemm_roofline((sample.m, sample.n, sample.k), sample.dtype, flops, memory)
    return (sample.n, sample.k), sample.m, least / sample.seconds


def _attention(sample: AttentionSample, flops: float, memory: float) -> _Point:
    family = (sample.heads, sample.kv_heads, sample.head_dim, sample.queries)
    return family, sample.context, attention_roofline(sample, flops, memory) / sample.seconds


def _collective(sample: CollectiveSample, file: TableFile) -> _Point:
    gpu = (file.hardware.nvlink_gb_s or file.hardware.memory_gb_s) * 1e9
    node = (file.hardware.nic_gb_s or file.hardware.memory_gb_s) * 1e9 * sample.per_node
    links = Links(gpu=gpu, node=node, gpus_per_node=sample.per_node, hop_s=0.0, local_hop_s=0.0)
    group = RankGroup(sample.ranks, sample.per_node)
    least = bytes_s(sample.kind, sample.bytes, group, links)
    return (sample.ranks, max(1.0, group.nodes)), sample.bytes, least / sample.seconds

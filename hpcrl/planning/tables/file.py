"""Files of measured kernel times: by shape, on one kind of GPU. `hpcrl.planning.tables.lookup` reads between them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from hpcrl.config.base import PositiveFloat, PositiveInt, Rate, StrictModel
from hpcrl.config.explain import explain_errors
from hpcrl.config.yamltree import parse_file
from hpcrl.errors import ConfigError, UsageError

TableDtype = Literal["float32", "bfloat16", "fp8"]
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "low_latency"]


class MeasuredHardware(StrictModel):
    """Peak rates of the GPU that was measured, as a cluster profile has them. Measured times are kept as shares of what
    these allow, and hold for another GPU of the same chip by its own peaks."""

    memory_gb_s: Rate
    """Bandwidth of its memory."""
    tflops: dict[TableDtype, Rate]
    """Dense matrix products by type."""
    nvlink_gb_s: Rate | None = None
    """Rate to the other GPUs of its node, each way. Required with collectives."""
    nic_gb_s: Rate | None = None
    """Rate of a GPU's part of the node's adapters, each way. Required with collectives between nodes."""


class GemmSample(StrictModel):
    """A matrix product of ``m x k`` and ``k x n``."""

    dtype: TableDtype
    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    seconds: PositiveFloat


class GroupedSample(GemmSample):
    """As many products as ``groups``, of ``m`` rows each, in one kernel."""

    groups: PositiveInt


class AttentionSample(StrictModel):
    """Causal attention, forward: the last ``queries`` tokens of one sequence of ``context`` tokens."""

    dtype: TableDtype
    queries: PositiveInt
    context: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    seconds: PositiveFloat


class CollectiveSample(StrictModel):
    """A collective of ``ranks`` GPUs, ``per_node`` of them on each node."""

    kind: CollectiveKind
    """``low_latency`` is the dispatch or combine of few tokens."""
    ranks: Annotated[int, Field(ge=2)]
    per_node: PositiveInt
    bytes: PositiveFloat
    """Bytes of the whole result of a gather and of the buffer of a reduction; of a rank's sent part in an
    all-to-all."""
    seconds: PositiveFloat


class TableFile(StrictModel):
    """A file of measured times."""

    format_version: Literal[1]
    """Version of this format."""
    device: Annotated[str, Field(min_length=1)]
    """GPU that was measured, as ``gpu_type`` of a cluster profile has it."""
    same_chip: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Other GPUs with the same chip: for these, the shares hold less surely."""
    source: Annotated[str, Field(min_length=10)]
    """Author, tool and time of the measurement."""
    hardware: MeasuredHardware
    gemm: Annotated[tuple[GemmSample, ...], Field(strict=False)] = ()
    grouped_gemm: Annotated[tuple[GroupedSample, ...], Field(strict=False)] = ()
    attention: Annotated[tuple[AttentionSample, ...], Field(strict=False)] = ()
    collectives: Annotated[tuple[CollectiveSample, ...], Field(strict=False)] = ()


def load_table(path: Path) -> TableFile:
    """Read a file of measured kernel times.

    Raises
    ------
    ConfigError
        With every finding: unknown keys, missing numbers, another version of the format.
    UsageError
        The file does not exist.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file\n    hint: `hpcrl plan profile -o FILE` makes one on a GPU of the site")
    tree, origins = parse_file(path)
    try:
        return TableFile.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain_errors(TableFile, error, origins, path)) from None


@lru_cache(maxsize=1)
def shipped_tables() -> tuple[TableFile, ...]:
    """Give the tables that come with hpcrl, from published figures."""
    return tuple(load_table(path) for path in sorted((Path(__file__).parent / "data").glob("*.yaml")))

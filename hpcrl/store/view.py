"""A pool as people and programs see it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcrl.store.admin import PoolStatus
from hpcrl.store.endpoints import StoreEndpoints

STORE_SCHEMA = "hpcrl.store/1"
CANARY_SCHEMA = "hpcrl.store.canary/1"
_GIB = 1 << 30


def pool_view(endpoints: StoreEndpoints, pool: PoolStatus) -> RenderableType:
    """Return a heading and a line for each segment."""
    used, capacity = pool.used_bytes / _GIB, pool.capacity_bytes / _GIB
    share = f" ({pool.used_bytes / pool.capacity_bytes:.0%})" if pool.capacity_bytes else ""
    head = Text.assemble(
        ("master ", "dim"), endpoints.master, f"  {used:.2f} of {capacity:.2f} GiB{share}  {pool.keys} blocks"
    )
    if not pool.segments:
        return Group(head, Text("no engine has joined the pool", style="yellow"))
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("segment", "GiB", "used"):
        table.add_column(column, justify="left" if column == "segment" else "right")
    for segment in pool.segments:
        share = f"{segment.used_bytes / segment.capacity_bytes:.0%}" if segment.capacity_bytes else "-"
        table.add_row(segment.name, f"{segment.capacity_bytes / _GIB:.2f}", share)
    return Group(head, table)

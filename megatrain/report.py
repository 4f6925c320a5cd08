"""The plan of a run as a person reads it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatrain.footprint import RAISE_LOCK, Footprint
from megatrain.ops import ArenaName, Lane
from megatrain.planner import Plan
from tiering.records import Tier


def size(nbytes: float) -> str:
    """Return bytes in binary units, three digits or so."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.4g} {unit}"


def plan_report(plan: Plan, *, slots: int) -> RenderableType:
    """Return the tables that a run prints before it allocates anything."""
    parts = [_summary(plan), _tiers(plan, slots), _arenas(plan), *_unlocked(plan), _traffic(plan)]
    return Group(*parts)


def _summary(plan: Plan) -> Text:
    shape, sizes = plan.step.shape, plan.step.sizes
    where = "RAM" if sizes.gradients_in_ram else "drives"
    return Text(
        f"{shape.parameters:,} parameters in {len(shape.units)} units; "
        f"{size(plan.host_nbytes)} of {size(plan.ram)} RAM planned; gradients wait in {where}; "
        f"slabs of {sizes.slab_length:,} elements"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _tiers(plan: Plan, slots: int) -> Table:
    table = _table("state", "tier", "records", "bytes", "share")
    total = sum(plan.tiers.values())
    for tier, nbytes in sorted(plan.tiers.items()):
        count = sum(place is tier for place in plan.step.placement.values())
        table.add_row(str(tier), f"{count}", size(nbytes), f"{nbytes / total:.1%}")
    table.add_row("on drives, all slots", "", size(total * slots), f"{slots} slots")
    return table


def _arenas(plan: Plan) -> Table:
    table = _table("memory", "arena", "slabs", "bytes", "where")
    if plan.resident_nbytes:
        table.add_row(str(ArenaName.RECORDS), "", size(plan.resident_nbytes), "RAM")
    for name, slabs in sorted(plan.arenas.items(), key=lambda item: -sum(item[1])):
        where = "RAM" if plan.on_host(name) else "device"
        table.add_row(str(name), str(len(slabs)), size(sum(slabs)), where)
    table.add_row("planned RAM", "", size(plan.host_nbytes), "RAM")
    if plan.cxl_nbytes:
        table.add_row("records", "", size(plan.cxl_nbytes), "cxl")
    if plan.footprint is not None:
        _footprint(table, plan, plan.footprint)
    return table


def _footprint(table: Table, plan: Plan, footprint: Footprint) -> None:
    table.add_row("imports", "", size(footprint.imports), "RAM")
    table.add_row("workspace", "", size(footprint.workspace.nbytes), "RAM")
    if footprint.workspace.device:
        table.add_row("workspace", "", size(footprint.workspace.device), "device")
    table.add_row("this process at most", "", size(plan.total_nbytes), "RAM")
    if footprint.stored:
        table.add_row("store on drives that are memory", "", size(footprint.stored), "RAM")
    table.add_row("limit", "", size(footprint.limit.nbytes), footprint.limit.source)
    if footprint.lock:
        table.add_row("locked", "", size(plan.arenas_nbytes), "RAM")


def _unlocked(plan: Plan) -> list[RenderableType]:
    """Return why the arenas may be swapped out, and what can be done about it."""
    footprint = plan.footprint
    if footprint is None or footprint.lock:
        return []
    if footprint.lock_limit is None or plan.arenas_nbytes <= footprint.lock_limit.nbytes:
        return [Text("the arenas are not locked in memory: memory.lock is off")]
    allowed = size(footprint.lock_limit.nbytes)
    return [
        Text(
            f"the arenas are not locked in memory and may be swapped out: "
            f"{footprint.lock_limit.source} allows {allowed}; {RAISE_LOCK}"
        )
    ]


def _traffic(plan: Plan) -> Table:
    table = _table("a step moves", "", "read", "written", "a parameter")
    parameters = plan.step.shape.parameters
    for tier in Tier:
        moved = plan.traffic.get(tier)
        if moved:
            per = f"{moved.read / parameters:.2f} + {moved.written / parameters:.2f} B"
            table.add_row(str(tier), size(moved.read), size(moved.written), per)
    for lane in Lane:
        if plan.lanes[lane] and lane in (Lane.COPY_IN, Lane.COPY_OUT):
            table.add_row(f"lane {lane}", size(plan.lanes[lane]), "", "")
    return table

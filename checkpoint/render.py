"""Reports for the eye, from the dataclasses that ``--json`` prints as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from checkpoint.export import Exported
from checkpoint.retention import Dropped, Pruned
from checkpoint.shard import Sharded
from checkpoint.sizes import format_size
from checkpoint.summary import GenerationLine, Summary, UnitLine
from checkpoint.verify import Finding, Findings, Verified


def show(report: RenderableType) -> None:
    """Print a report on standard output."""
    Console(highlight=False, soft_wrap=True).print(report)


def summary_report(summary: Summary) -> RenderableType:
    """Return what ``inspect`` shows."""
    return Group(
        Text(_headline(summary)),
        Text(_state(summary)),
        *_section("units", _units(_merged(summary.units))),
        *_section("drives", _drives(summary)),
        *_section("came from", _ledger(summary)),
    )


def _headline(summary: Summary) -> str:
    return (
        f"{summary.path}: {summary.model_type}, {summary.parameters:,} parameters, "
        f"layout {summary.layout}, {format_size(summary.nbytes)} a generation "
        f"({summary.bytes_per_parameter:.1f} B a parameter)"
    )


def _state(summary: Summary) -> str:
    listed = ", ".join(map(_generation, summary.generations))
    holder = f"in use by {summary.holder}" if summary.holder else "not in use"
    dropped = "".join(
        f"; dropped generation {item.generation} is still read by {_pids(item.readers)}"
        for item in summary.dropped
    )
    return f"generations {listed}{dropped}; last commit {_age(summary.age_s)} ago; {holder}"


def _generation(line: GenerationLine) -> str:
    again = line.parent is not None and line.parent < line.generation - 1
    details = [
        f"step {line.step}",
        *([f"{line.parent} again"] if again else []),
        *([f"read by {_pids(line.readers)}"] if line.readers else []),
    ]
    return f"{line.generation} ({', '.join(details)})"


def _pids(pids: Sequence[int]) -> str:
    return f"pid {', '.join(map(str, pids))}"


def _age(age_s: float) -> str:
    for seconds, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


def _section(title: str, body: RenderableType) -> tuple[RenderableType, RenderableType]:
    return Text(f"\n{title}", style="bold"), body


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _merged(units: Sequence[UnitLine]) -> list[tuple[str, UnitLine]]:
    """Return one line for each run of units of the same size."""
    lines: list[tuple[str, UnitLine]] = []
    for unit in units:
        if lines and (unit.roles, unit.parameters) == (lines[-1][1].roles, lines[-1][1].parameters):
            first = lines[-1][0].split(" to ")[0]
            lines[-1] = (f"{first} to {unit.unit}", unit)
        else:
            lines.append((unit.unit, unit))
    return lines


def _units(lines: Sequence[tuple[str, UnitLine]]) -> Table:
    table = _table("unit", "tensors", "parameters", "roles", right=("tensors", "parameters"))
    for title, unit in lines:
        roles = ", ".join(f"{r.role} {r.dtype} {format_size(r.nbytes)}" for r in unit.roles)
        count = f"{unit.parameters:,}" if unit.trainable else "not trained"
        table.add_row(title, str(len(unit.tensors)), count, roles)
    return table


def _drives(summary: Summary) -> Table:
    columns = ("drive", "share", "files", "bytes", "on disk", "free", "folder")
    table = _table(*columns, right=columns[:-1])
    for drive in summary.drives:
        sizes = (drive.nbytes, drive.allocated_nbytes, drive.free_nbytes)
        share = f"{100 * drive.share:.1f} %"
        cells = (str(drive.drive), share, str(drive.files), *map(format_size, sizes))
        table.add_row(*cells, drive.folder)
    return table


def _ledger(summary: Summary) -> RenderableType:
    ledger = summary.ledger
    lines = [f"{s.name}: {s.tensors} tensors, {format_size(s.nbytes)}" for s in ledger.sources]
    lines += [f"{tie.alias} is {tie.target}" for tie in summary.ties]
    lines += [f"note: {note}" for note in ledger.notes]
    lines += [f"ignored {item.name}: {item.reason}" for item in ledger.ignored]
    lines.append(f"side files: {', '.join(summary.files) or 'none'}")
    return Text("\n".join(lines))


def findings_document(findings: Findings) -> Mapping[str, Any]:
    """Return what ``verify --json`` prints."""
    return {"ok": findings.ok, **asdict(findings)}


def findings_report(findings: Findings) -> RenderableType:
    """Return what ``verify`` shows."""
    lines = [_verified(item, findings.deep) for item in findings.generations]
    of_store = [finding for finding in findings.findings if finding.generation is None]
    if of_store:
        lines = [f"the store is damaged: {len(of_store)} findings", *lines]
    return Text("\n".join((*lines, *map(_finding, findings.findings))))


def _verified(item: Verified, deep: bool) -> str:
    read = f"{item.chunks} chunks, {format_size(item.nbytes)} read"
    checked = f"{item.records} records, " + (
        read if deep else "structure only; --deep reads every byte"
    )
    what = "is what was committed" if item.ok else "is damaged"
    return f"generation {item.generation} (step {item.step}) {what}: {checked}"


def _finding(finding: Finding) -> str:
    where = [finding.file] if finding.file and finding.file not in finding.what else []
    if finding.drive is not None and "drive" not in finding.what:
        where.append(f"drive {finding.drive}")
    if finding.offset is not None and "offset" not in finding.what:
        where.append(f"offset {finding.offset}")
    if finding.unit:
        tensors = ", ".join(finding.tensors[:3]) or "no tensor"
        more = f" and {len(finding.tensors) - 3} more" if len(finding.tensors) > 3 else ""
        where.append(f"{finding.unit}.{finding.role} ({tensors}{more})")
    title = f"generation {finding.generation}: " if finding.generation else ""
    return f"  {title}{finding.what}" + (f": {'; '.join(where)}" if where else "")


def exported_report(exported: Exported, out: str) -> RenderableType:
    """Return what ``export`` shows."""
    return Text(
        f"{out}: {exported.tensors} tensors, {format_size(exported.nbytes)} in "
        f"{len(exported.files)} files, from generation {exported.generation} "
        f"(step {exported.step})"
    )


def shard_document(sharded: Sharded) -> Mapping[str, Any]:
    """Return what ``shard --json`` prints."""
    moved, recoded = sharded.moved, sharded.recoded
    return {
        "moved": moved
        and {
            "files": moved.files,
            "nbytes": moved.nbytes,
            "drives": [
                {"drive": drive.number, "share": drive.share, "folder": str(drive.folder)}
                for drive in moved.drives
            ],
            "dropped": [str(folder) for folder in moved.dropped],
        },
        "recoded": recoded and asdict(recoded),
    }


def sharded_report(sharded: Sharded, store: str) -> RenderableType:
    """Return what ``shard`` shows."""
    lines = []
    if moved := sharded.moved:
        shares = ", ".join(f"{d.folder} {100 * d.share:.1f} %" for d in moved.drives)
        lines.append(
            f"{store}: on {len(moved.drives)} drives ({shares}); "
            f"{moved.files} files moved, {format_size(moved.nbytes)}"
        )
        lines += [f"{folder} holds nothing of it any more" for folder in moved.dropped]
    if recoded := sharded.recoded:
        lines.append(
            f"{store}: generation {recoded.generation}, {recoded.records} records cut anew, "
            f"{format_size(recoded.nbytes_before)} before, {format_size(recoded.nbytes_after)} now"
        )
    return Text("\n".join(lines or [f"{store}: is like that already"]))


def pruned_report(pruned: Pruned) -> RenderableType:
    """Return what ``prune`` shows."""
    if pruned.nothing:
        return Text("\n".join((f"{pruned.store}: there is nothing to drop", *_held(pruned))))
    lines = [f"{pruned.store}: {_kept(pruned)}"]
    lines += [
        f"{'dropped' if pruned.done else 'drops'} {_dropped(item)}" for item in pruned.dropped
    ]
    verb = "freed" if pruned.done else "frees"
    lines += [f"{verb} {format_size(pruned.nbytes)} in {len(pruned.slots)} slots", *_held(pruned)]
    if not pruned.done:
        lines.append("nothing was changed; add --yes to do it")
    return Text("\n".join(lines))


def _kept(pruned: Pruned) -> str:
    numbers = ", ".join(map(str, pruned.kept))
    renamed = f"; {pruned.kept[-1]} becomes {pruned.newest}"
    return f"keeps generation {numbers}{renamed if pruned.newest != pruned.kept[-1] else ''}"


def _dropped(item: Dropped) -> str:
    damage = f", which is damaged: {item.damage}" if item.damage else ""
    return f"generation {item.generation} (step {item.step}){damage}"


def _held(pruned: Pruned) -> list[str]:
    if not pruned.held:
        return []
    slots = ", ".join(map(str, pruned.held))
    return [f"slot {slots} stays while it is being read; prune again when that has ended"]

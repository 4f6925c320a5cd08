"""The findings for the eye and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatrain.doctor.findings import BAD, Finding, Section, Verdict

_STYLES = {
    Verdict.OK: "green",
    Verdict.NOTE: "cyan",
    Verdict.WARNING: "yellow",
    Verdict.PROBLEM: "bold red",
    Verdict.UNKNOWN: "dim",
    Verdict.NONE: "dim",
}


def section_report(section: Section) -> RenderableType:
    """Return one section as a table."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=max(map(len, Verdict)))
    table.add_column(width=17)
    table.add_column(overflow="fold")
    for finding in section.findings:
        # as Text: brackets in names of files are no markup
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        table.add_row(verdict, Text(finding.subject), _told(finding))
    return Group(Text(section.title, style="bold"), table, Text())


def _told(finding: Finding) -> Text:
    told = Text(finding.found)
    if finding.advice:
        told.append(f"\n-> {finding.advice}", style="italic")
    return told


def summary(sections: Sequence[Section]) -> str:
    """Return the last line: how many findings ask for something."""
    verdicts = [finding.verdict for section in sections for finding in section.findings]
    counts = {verdict: verdicts.count(verdict) for verdict in (Verdict.PROBLEM, Verdict.WARNING)}
    told = [f"{n} {verdict}{'s' * (n > 1)}" for verdict, n in counts.items() if n]
    return ", ".join(told) or "nothing here stands in the way of a run"


def is_fine(sections: Sequence[Section]) -> bool:
    """Return whether no finding asks for something."""
    return not any(f.verdict in BAD for section in sections for f in section.findings)


def document(sections: Sequence[Section]) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "ok": is_fine(sections),
        "findings": [
            {"section": section.title, **asdict(finding)}
            for section in sections
            for finding in section.findings
        ],
    }

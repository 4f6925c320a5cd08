"""The command: one report, one JSON document, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from megatrain.cli import cli
from megatrain.doctor.findings import Finding, Section, Verdict, looked_at
from megatrain.doctor.report import document, is_fine, section_report, summary
from tests.support.loops import memory_mount
from tiering.errors import StorageError


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["doctor", *map(str, arguments)])


def test_one_json_document_whose_verdict_is_the_exit_code(tmp_path):
    with memory_mount(tmp_path, "tmpfs") as point:
        result = doctor("--json", "--drive", point)
    told = json.loads(result.stdout)
    assert result.exit_code == 1, "a drive in memory is a warning"
    assert told["ok"] is False
    for finding in told["findings"]:
        assert finding.keys() == {"section", "subject", "verdict", "found", "advice", "values"}
        assert finding["verdict"] in set(Verdict)
        assert finding["found"]
    sections = {finding["section"] for finding in told["findings"]}
    assert {"memory", "NUMA and CXL", f"drive {point}", "GPU", "optimizer", "programs"} == sections


def test_the_report_has_a_verdict_on_every_subject(tmp_path):
    with memory_mount(tmp_path, "tmpfs") as point:
        result = doctor("--drive", point)
    assert "warning" in result.stdout
    assert "-> use a folder on a drive" in result.stdout
    for subject in ("huge pages", "memory-only nodes", "GPU", "kvikio", "CPU Adam", "python"):
        assert subject in result.stdout


def test_a_burn_of_memory_is_refused_before_anything_is_looked_at(tmp_path):
    with memory_mount(tmp_path, "tmpfs") as point:
        result = doctor("--drive", point, "--burn", "1MiB")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "is RAM" in result.stderr


def test_a_burn_larger_than_the_drive_is_refused(tmp_path):
    result = doctor("--drive", tmp_path, "--burn", "900PiB")
    assert result.exit_code == 3
    assert str(tmp_path) in result.stderr


def test_a_wrong_command_line_is_told(tmp_path):
    assert doctor("--drive", tmp_path / "none").exit_code == 2
    result = doctor("--drive", tmp_path, "--burn", "much")
    assert result.exit_code == 2
    assert "'much' is no size" in result.stderr
    assert doctor("--drive", tmp_path, "--burn", "0").exit_code == 2


def finding(verdict: Verdict) -> Finding:
    return Finding(subject="[b]x[/b]", verdict=verdict, found=str(Path("/a[/b]")))


def test_only_what_asks_for_something_fails():
    calm = (Verdict.OK, Verdict.NOTE, Verdict.UNKNOWN, Verdict.NONE)
    sections = [Section(title="t", findings=tuple(map(finding, calm)))]
    assert is_fine(sections)
    assert document(sections)["ok"]
    sections.append(Section(title="u", findings=(finding(Verdict.WARNING),) * 2))
    assert not is_fine(sections)
    assert summary(sections) == "2 warnings"


def test_names_are_printed_as_they_are(capsys):
    from rich.console import Console

    Console().print(section_report(Section(title="[/t]", findings=(finding(Verdict.OK),))))
    out = capsys.readouterr().out
    assert "[/t]" in out
    assert "[b]x[/b]" in out
    assert "/a[/b]" in out


def test_what_was_seen_before_a_failure_is_kept():
    def look():
        yield finding(Verdict.OK)
        raise StorageError("write", "/drive", errno=5)

    first, second = looked_at("transfers", look)
    assert first.verdict is Verdict.OK
    assert second.verdict is Verdict.PROBLEM
    assert "cannot write /drive" in second.found

    def refused():
        raise PermissionError(13, "Permission denied")

    (found,) = looked_at("nodes", refused)
    assert found.verdict is Verdict.UNKNOWN

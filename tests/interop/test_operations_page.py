"""Every command of docs/operations.md does what the page says, on a tiny run.

Blocks of one section run one after the other, each section from a run that was stopped after its
second step of four. ``/data1`` and the like are folders of the test.
"""

from __future__ import annotations

import configparser
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkpoint.verify import verify
from tests.support.quick_commands import quick_commands
from tests.support.shell_page import Block, absolute_paths, blocks_of, missing, program
from tiering.generations import read_root
from tiering.store import open_reader

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BLOCKS = blocks_of(PAGE)
SHELL = [block for block in BLOCKS if block.language == "bash"]
SECTIONS = list(dict.fromkeys(block.section for block in SHELL))

PLACES = ("data1", "data2", "data3", "mnt/new", "mnt/backup")
OTHER_PATHS = re.compile(r"/dev/(null|nvme0|sda)|/sys/block/.*")
NOT_HERE = {
    "nvme": "needs an NVMe drive, and changes it",
    "hdparm": "needs a SATA drive, and changes it",
    "systemctl": "needs a running systemd; the unit itself is checked",
    "loginctl": "needs a running systemd",
    "journalctl": "needs a running systemd, and follows for ever",
} | ({} if shutil.which("rsync") else {"rsync": "is not installed"})
SMALLER = {"200GiB": "2MiB"}  # of what is written only to be measured
STEPS, STOPPED_AFTER = 4, 2
SMALL = {
    "data": {"max_seq_len": 64},
    "train": {"steps": STEPS, "micro_batch": 2, "accumulate": 2, "device": "cpu"},
    "memory": {"ram": "64MiB", "workspace": "64MiB", "resident": 0},
}
PATIENCE_S = 120


@dataclass(frozen=True, slots=True)
class Site:
    """The folder of the test, with a home and what the page calls drives."""

    base: Path
    programs: Path

    @property
    def home(self) -> Path:
        return self.base / "now/home"

    @property
    def store(self) -> Path:
        return self.home / "runs/my-run/store"

    def place(self, name: str) -> Path:
        return self.base / "now" / name

    def here(self, text: str) -> str:
        """Return a script of the page with the places of the test."""
        places = rf"(?<![\w./])/({'|'.join(PLACES)})(?=[/\s\"'*]|$)"
        text = re.sub(places, lambda match: str(self.place(match[1])), text)
        for large, small in SMALLER.items():
            text = text.replace(large, small)
        return text

    def as_on_the_page(self, output: str) -> str:
        for name in PLACES:
            output = output.replace(str(self.place(name)), f"/{name}")
        return output.replace(f"{self.home}/", "")

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "COLUMNS": "250",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def shell(self, script: str) -> tuple[int, str]:
        """Run a script; return how it ended and what it said."""
        started = self.start("bash", "-c", self.here(script))
        try:
            output, _ = started.communicate(timeout=PATIENCE_S)
        finally:
            started.kill()
        return started.returncode, self.as_on_the_page(output)

    def keep(self) -> None:
        shutil.copytree(self.base / "now", self.base / "kept", symlinks=True)

    def reset(self) -> None:
        shutil.rmtree(self.base / "now")
        shutil.copytree(self.base / "kept", self.base / "now", symlinks=True)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    base = tmp_path_factory.mktemp("operations")
    with quick_commands(base / "quick") as programs:
        site = Site(base, programs)
        (programs / "sleep").write_text('#!/bin/sh\necho "$@" > ~/slept\n')
        (programs / "sleep").chmod(0o755)
        for name in (*PLACES, "home"):
            site.place(name).mkdir(parents=True)
        _begin(site)
        site.keep()
        yield site


@pytest.fixture
def site(prepared: Site) -> Site:
    prepared.reset()
    return prepared


def _begin(site: Site) -> None:
    """Make the run of the page, stopped after its second step."""
    [printed] = [block.text for block in BLOCKS if block.language == "yaml"]
    settings = yaml.safe_load(printed)
    settings["store"]["drives"] = [site.here(drive) for drive in settings["store"]["drives"]]
    for section, values in SMALL.items():
        settings[section] = settings.get(section, {}) | values
    (site.home / "run.yaml").write_text(yaml.safe_dump(settings))
    made = "call tests.support.stopped_run:make . " + str(STOPPED_AFTER)
    code, output = site.shell(made)
    assert code == 0, output


# -- what a section is about -----------------------------------------------------------------------


def _assert_finished(site: Site, store: Path) -> None:
    with open_reader(store) as reader:
        assert reader.manifest.step == STEPS
    assert verify(store, deep=True).ok


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _folders(site: Site) -> set[str]:
    """Return what is a drive of the run, by its place."""
    links = (site.store / "drives").iterdir()
    return {str(link.resolve().parent.relative_to(site.base / "now")) for link in links}


def _after_doctor(site: Site) -> None:
    found = json.loads((site.home / "machine.json").read_text())
    titles = json.dumps(found)
    assert all(f"drive {site.place(name)}" in titles for name in ("data1", "data2"))


def _after_moving(site: Site) -> None:
    assert _folders(site) == {"data1", "mnt/new"}
    assert not list(site.place("data2").iterdir())
    _assert_finished(site, site.store)
    assert len(read_root(site.store).generations) == 1


def _after_dying(site: Site) -> None:
    assert _folders(site) == {"mnt/new", "data3"}
    assert not list(site.place("data1").iterdir())
    assert site.shell("rm -r /data2; megatrain-ckpt resume runs/my-run")[0] == 0
    _assert_finished(site, site.store)


def _after_copying(site: Site) -> None:
    """Original and copies went on, each by itself."""
    new = site.place("mnt/new")
    for name in ("my-run", "two"):
        _assert_finished(site, new / name / "store")
        assert [row["step"] for row in _rows(new / name)] == [1, 2, 3, 4]
    with open_reader(new / "one/store") as reader:
        assert reader.manifest.step == STOPPED_AFTER
    assert not (site.home / "runs/renamed").exists()
    _assert_finished(site, site.place("mnt/backup") / "renamed/store")


@contextmanager
def _training(site: Site) -> Iterator[None]:
    """Train meanwhile, with commits as far apart as those of a model of some size."""
    more = ["train.steps=1000000", "store.commit_every=3"]
    sets = [word for setting in more for word in ("--set", setting)]
    training = site.start("megatrain-ckpt", "resume", "runs/my-run", "--allow-changes", *sets)
    try:
        _await(lambda: _step(site.store) > STOPPED_AFTER)
        plain = site.base / "now/plain"
        shutil.copytree(site.store, plain, symlinks=True)
        slots = len(list((site.store / "slots").glob("[0-9]*")))
        _await(lambda: _newest(site.store) >= _newest(plain) + slots)
        yield
        output, _ = training.communicate(timeout=PATIENCE_S)
        assert training.returncode == 130, output
    finally:
        training.kill()
    for link in (plain / "drives").iterdir():
        folder = link.resolve()
        link.unlink()
        link.symlink_to(shutil.copytree(folder, site.base / f"now/plain-{link.name}"))
    assert not verify(plain, deep=True).ok, "a plain copy was a backup after all"


def _step(store: Path) -> int:
    return read_root(store).latest.step


def _newest(store: Path) -> int:
    return read_root(store).latest.number


def _await(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def _after_backup(site: Site) -> None:
    copy, stopped = site.place("mnt/backup") / "my-run", _step(site.store)
    with open_reader(copy / "store") as reader:
        assert STOPPED_AFTER < reader.manifest.step < stopped
        assert all(drive.folder.is_relative_to(copy / "store") for drive in reader.drives)
    assert verify(site.store, deep=True).ok
    goes_on = (
        f"megatrain-ckpt resume /mnt/backup/my-run --allow-changes --set train.steps={stopped}"
    )
    code, output = site.shell(goes_on)
    assert code == 0, output
    assert verify(copy / "store", deep=True).ok
    assert _step(copy / "store") == stopped
    assert verify(site.store, deep=True).ok


def _after_sizing(site: Site) -> None:
    """The table is what the plan and the metrics of the run have."""
    rows = _rows(site.home / "runs/other")
    assert len(rows) == STEPS
    with open_reader(site.store) as reader:
        nbytes = sum(record.nbytes for record in reader.records.values())
    code, output = site.shell("megatrain-ckpt inspect runs/my-run/store --json")
    assert code == 0
    parameters = json.loads(output)["parameters"]
    assert 14 * parameters <= nbytes < 14.2 * parameters
    written = rows[-1]["written_bytes"]["nvme"]
    assert 14 * parameters <= written < 17 * parameters  # small records are rounded up


@contextmanager
def _in_use(site: Site) -> Iterator[None]:
    """Keep the store locked until somebody sleeps."""
    os.mkfifo(site.home / "slept")
    naps: list[str] = []
    lock = os.open(site.store / "LOCK", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def let_go() -> None:
        with (site.home / "slept").open() as slept:
            os.close(lock)
            naps.append(slept.read())

    waiting = threading.Thread(target=let_go, daemon=True)
    waiting.start()
    yield
    waiting.join(PATIENCE_S)
    assert naps == ["60\n"]


AROUND: dict[str, Callable[[Site], AbstractContextManager[None]]] = {
    "Backing up while training runs": _training,
    "Runs that nobody watches": _in_use,
}
AFTER: dict[str, Callable[[Site], None]] = {
    "What can this machine do": _after_doctor,
    "Drives that fill up, move or are replaced": _after_moving,
    "A drive that is dying": _after_dying,
    "Copying and moving": _after_copying,
    "Backing up while training runs": _after_backup,
    "How much disk, and how fast it wears": _after_sizing,
    "Runs that nobody watches": lambda site: _assert_finished(site, site.store),
}


# -- the page ------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS)
def test_the_commands_of_a_section_do_what_it_says(site: Site, section: str) -> None:
    around = AROUND.get(section)
    with around(site) if around else nullcontext():
        for block in SHELL:
            if block.section == section:
                _assert_right(site, block)
    if section in AFTER:
        AFTER[section](site)


def _assert_right(site: Site, block: Block) -> None:
    syntax = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert not syntax.returncode, f"line {block.line}: {syntax.stderr}"
    code, output = site.shell(_forgiving(block.script(NOT_HERE)))
    assert code == 0, f"line {block.line} of the page:\n{block.text}\nended with {code}:\n{output}"
    lacking = missing(block.claims(), output)
    assert not lacking, f"line {block.line} of the page claims {lacking!r}; found:\n{output}"


def _forgiving(script: str) -> str:
    """Let doctor find what it will: its exit code 1 says what machine this is."""
    return re.sub(r"^(megatrain doctor [^#\n]*)", r"{ \1; } || [ $? = 1 ]  ", script, flags=re.M)


def test_a_command_that_fails_or_says_something_else_is_noticed(site: Site) -> None:
    for text, says, fault in (
        ("megatrain-ckpt inspekt runs/my-run/store", "", "ended with 2"),
        ("megatrain-ckpt inspect runs/my-run/stores", "", "ended with 3"),
        ("nonexistent --flag", "", "ended with 127"),
        ("if true; then", "", "syntax error"),
        ("false; true", "", "ended with 1"),
        ("false | true", "", "ended with 1"),
        ("megatrain-ckpt inspect nothing  # exits 0", "", "ended with 3, not 0"),
        ("megatrain-ckpt inspect nothing  # exits 3: no such thing", "", "claims 'no such thing'"),
        ("megatrain-ckpt inspect runs/my-run/store", "gpt2, ... parameters", "claims 'gpt2"),
        ("sudo nvme 'set-feature", "", "unexpected EOF"),
    ):
        block = Block(section="", language="bash", text=f"{text}\n", line=1, says=says)
        with pytest.raises(AssertionError, match=re.escape(fault)):
            _assert_right(site, block)


def test_the_page_names_no_place_that_the_test_does_not_know() -> None:
    allowed = re.compile(rf"/({'|'.join(PLACES)})(/.*)?")
    for block in SHELL:
        for path in absolute_paths(block.text):
            assert allowed.fullmatch(path) or OTHER_PATHS.fullmatch(path), (block.line, path)


def test_what_is_left_out_is_on_the_page() -> None:
    named = {program(line) for block in SHELL for line in block.text.splitlines()}
    assert named >= NOT_HERE.keys()


def test_what_is_checked_is_on_the_page() -> None:
    assert AROUND.keys() | AFTER.keys() <= set(SECTIONS)


def test_links_within_the_page_lead_somewhere() -> None:
    text = PAGE.read_text()
    headings = re.findall(r"^##+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert links
    assert set(links) <= anchors


def test_the_service_of_the_page_is_one_and_resumes_the_run(site: Site, tmp_path: Path) -> None:
    [unit] = [block.text for block in BLOCKS if block.language == "ini"]
    (site.home / ".venv/bin").mkdir(parents=True)
    (site.home / ".venv/bin/megatrain-ckpt").symlink_to(site.programs / "megatrain-ckpt")
    unit = site.here(unit).replace("%h", str(site.home))
    path = tmp_path / "my-run.service"
    path.write_text(unit)
    if analyze := shutil.which("systemd-analyze"):
        checked = subprocess.run([analyze, "verify", path], capture_output=True, text=True)
        about = [line for line in checked.stderr.splitlines() if path.name in line]
        assert not about, checked.stderr
    service = configparser.ConfigParser()
    service.optionxform = str  # type: ignore[assignment,method-assign]
    service.read_string(unit)
    assert Path(service["Service"]["WorkingDirectory"]) == site.home
    started = site.start(*shlex.split(service["Service"]["ExecStart"]))
    output, _ = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 0, output
    _assert_finished(site, site.store)

"""Real commands on tiny models, what they make undisturbed, and what they may leave behind."""

from __future__ import annotations

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoint.verify import verify
from megatrain import run
from megatrain.config import RunConfig
from megatrain.trainer import Stop
from tests.support.children import Children, Ended
from tests.support.runs import Quiet, numbers, run_config, tiny_llama, token_rows
from tiering.errors import MegatrainError
from tiering.generations import MARKER
from tiering.store import open_reader

Command = Sequence[str | Path]
_LEFT_OVER = (".unfinished", ".new", ".old")


class Site:
    """A folder with a tiny model and data, and ``work``, in which one command at a time works."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.model = tiny_llama(base / "model")
        self.data = token_rows(base / "rows.jsonl")
        self.work = base / "work"
        self.store = self.work / "store"
        self.out = self.work / "out"
        self.run = self.work / "run"
        self.run_file = self.work / "run.yaml"
        self.drives = [self.work / name for name in ("a", "b", "c")]

    def clear(self) -> None:
        """Leave nothing in ``work`` but empty drives."""
        shutil.rmtree(self.work, ignore_errors=True)
        for folder in (self.work, *self.drives):
            folder.mkdir()

    def config(self, **changes: Any) -> RunConfig:
        """Return a run of 3 steps whose state and gradients wait on two drives."""
        settings = {
            "memory__resident": 1,
            "memory__gradients": "disk",
            "store__drives": [str(drive) for drive in self.drives[:2]],
        }
        return run_config(self.model, self.data, self.run, **settings | changes)

    def striped(self, count: int = 2) -> list[str | Path]:
        """Return options for the first drives."""
        return [word for drive in self.drives[:count] for word in ("--drive", drive)]


class Program(ABC):
    """One command, as often as wanted from the same start.

    ``name`` says what it is; ``expected`` is what it makes when nothing disturbs it.
    """

    name: str

    def __init__(self, site: Site, children: Children) -> None:
        self.site = site
        self._children = children
        self._template = site.base / f"before-{self.name.replace(' ', '-')}"
        site.clear()
        self.prepare()
        shutil.copytree(site.work, self._template, symlinks=True)
        self.must_run(self.command)
        self.expected = self.result()

    @property
    @abstractmethod
    def command(self) -> Command:
        """What is run."""

    @abstractmethod
    def prepare(self) -> None:
        """Make in ``site.work`` what the command needs."""

    @abstractmethod
    def result(self) -> Any:
        """Return what the command made, to be compared."""

    @abstractmethod
    def remains(self, ended: Ended) -> str:
        """Return what is wrong with what a command left that failed or was killed; "" if nothing.

        It may have been killed at any moment or have failed with any message.
        """

    def again(self) -> Command:
        """Return the command that goes on after a failure: the same one, if nothing is said."""
        return self.command

    def reset(self) -> None:
        """Bring back the start."""
        shutil.rmtree(self.site.work, ignore_errors=True)
        shutil.copytree(self._template, self.site.work, symlinks=True)

    def must_run(self, command: Command) -> None:
        """Run a command that has to succeed."""
        ended = self._children.run(command)
        assert ended.code == 0, f"{command}: {ended.code}\n{ended.err}"

    def differs(self) -> str:
        """Return how what is there differs from what the undisturbed command makes; "" if not."""
        try:
            found = self.result()
        except MegatrainError as error:
            return f"cannot be opened: {error}"
        if found != self.expected:
            return f"differs in {_differing(found, self.expected)}"
        return _left_over(self.site.work)


def _differing(found: Any, expected: Any) -> str:
    if not (isinstance(found, dict) and isinstance(expected, dict)):
        return f"{str(found)[:200]}, expected {str(expected)[:200]}"
    keys = [k for k in {*found, *expected} if found.get(k) != expected.get(k)]
    return ", ".join(sorted(keys)[:5])


def _left_over(work: Path) -> str:
    """Return the first file that is not a part of anything, or ""."""
    linked = {path.resolve() for path in work.rglob("c/*") if path.is_symlink()}
    for path in sorted(work.rglob("*")):
        shard = path.is_file() and path.parent.name.startswith("megatrain-")
        orphan = shard and path.name != "drive.json" and path.resolve() not in linked
        unfinished = path.name == MARKER or path.name.endswith(_LEFT_OVER)
        if orphan or unfinished or ".partial-" in path.name:
            return f"leaves {path}"
    return ""


def content(store: Path) -> Mapping[str, Any]:
    """Return what the newest generation holds, every byte of it checked, and its train state."""
    findings = verify(store, deep=True)
    found: dict[str, Any] = {"findings": [finding.what for finding in findings.findings]}
    with open_reader(store) as reader:
        for name, record in reader.records.items():
            data = bytearray(record.nbytes)
            reader.read(name, 0, memoryview(data))
            found[name] = (record.codec, hashlib.sha256(data).hexdigest())
        state = dict(reader.manifest.train_state)
        state.pop("run_id", None)
        found |= {"step": reader.manifest.step, "state": json.dumps(state, sort_keys=True)}
    return found


def unopenable(store: Path) -> str:
    """Return why the store cannot be opened or what is damaged in it; "" if it is whole."""
    try:
        findings = verify(store, deep=True).findings
    except MegatrainError as error:
        return f"cannot be opened: {error}"
    return "; ".join(finding.what for finding in findings[:3])


# -- the commands ----------------------------------------------------------------------------------


class Convert(Program):
    """A model into a store on two drives."""

    name = "convert"
    options: Sequence[str] = ()

    @property
    def command(self) -> Command:
        site = self.site
        words = ["megatrain-ckpt", "convert", site.model, site.store]
        return [*words, *site.striped(), *self.options]

    def prepare(self) -> None:
        pass

    def result(self) -> Any:
        return content(self.site.store)

    def remains(self, ended: Ended) -> str:
        if not run.is_store(self.site.store):
            return ""
        if ended.code > 0 and (self.site.store / MARKER).exists():
            return "leaves a store whose commit is in doubt"
        return unopenable(self.site.store)

    def again(self) -> Command:
        if run.is_store(self.site.store):
            return ["megatrain-ckpt", "verify", self.site.store]
        return self.command


class ConvertEncoded(Convert):
    """A model into a store of encoded shards on two drives."""

    name = "convert to zarr"
    options = ("--tier", "zarr")


class OfStore(Program):
    """A command on a store that is there before it and whole after it, whatever happens."""

    def prepare(self) -> None:
        site = self.site
        self.must_run(["megatrain-ckpt", "convert", site.model, site.store, *site.striped()])

    def remains(self, ended: Ended) -> str:
        return unopenable(self.site.store)


class Export(OfStore):
    """A store into a model's folder."""

    name = "export"

    @property
    def command(self) -> Command:
        return ["megatrain-ckpt", "export", self.site.store, self.site.out]

    def result(self) -> Any:
        return _files(self.site.out)

    def remains(self, ended: Ended) -> str:
        if ended.code < 0:  # then nobody could remove what is hidden
            self._sweep()
        elif wrong := self._unnamed(ended.err):
            return f"leaves {wrong} and does not say so"
        return super().remains(ended) or self._wrong_target(ended)

    def _wrong_target(self, ended: Ended) -> str:
        if not self.site.out.exists():
            return ""
        return "leaves a model's folder" if ended.code > 0 else self.differs()

    def _unnamed(self, text: str) -> str:
        hidden = list(self.site.work.glob(".out.partial-*"))
        unnamed = [path.name for path in hidden if path.name not in text]
        self._sweep()
        return unnamed[0] if unnamed else ""

    def _sweep(self) -> None:
        for path in self.site.work.glob(".out.partial-*"):
            shutil.rmtree(path)


class ExportOver(Export):
    """A store into the folder of another model, which stays until the new one is whole."""

    name = "export over another"

    @property
    def command(self) -> Command:
        return [*super().command, "--overwrite"]

    def prepare(self) -> None:
        super().prepare()
        shutil.copytree(self.site.model, self.site.out)
        (self.site.out / "of-the-other").write_text("other")
        self._before = _files(self.site.out)

    def _wrong_target(self, ended: Ended) -> str:
        if not self.site.out.exists():
            return "the other model is gone"
        if _files(self.site.out) == self._before:
            return ""
        if ended.code > 0 and not (set(self.site.work.glob("*.old")) and ".old/" in ended.err):
            return "replaces the other model"
        return self.differs()


class Move(OfStore):
    """A store from two drives to another two."""

    name = "shard to other drives"

    @property
    def command(self) -> Command:
        site = self.site
        targets = [word for drive in site.drives[1:] for word in ("--drive", drive)]
        return ["megatrain-ckpt", "shard", site.store, *targets]

    def result(self) -> Any:
        with open_reader(self.site.store) as reader:
            places = [drive.folder.parent.name for drive in reader.drives]
        return {**content(self.site.store), "drives": places}


class Encode(OfStore):
    """A store from raw to encoded shards."""

    name = "shard to zarr"

    @property
    def command(self) -> Command:
        return ["megatrain-ckpt", "shard", self.site.store, "--tier", "zarr"]

    def result(self) -> Any:
        return content(self.site.store)


class Train(Program):
    """A run of 3 steps, its model's conversion included."""

    name = "train"

    @property
    def command(self) -> Command:
        return ["megatrain", "train", self.site.run_file]

    def prepare(self) -> None:
        self.site.run_file.write_text(self.site.config().to_json())

    def result(self) -> Any:
        return {**content(self.site.run / "store"), "metrics": numbers(self.site.run)}

    def remains(self, ended: Ended) -> str:
        store = self.site.run / "store"
        return unopenable(store) if run.is_store(store) else ""

    def again(self) -> Command:
        store = self.site.run / "store"
        if run.is_store(store):
            with open_reader(store) as reader:
                if reader.manifest.train_state:
                    return ["megatrain-ckpt", "resume", self.site.run]
        return ["megatrain", "train", self.site.run_file]


class Resume(Train):
    """The second half of a run whose state is in encoded shards, in RAM and on drives."""

    name = "resume"

    @property
    def command(self) -> Command:
        return ["megatrain-ckpt", "resume", self.site.run]

    def prepare(self) -> None:
        super().prepare()
        stop = Stop()
        run.train(self.site.config(), Quiet(lambda row: stop.request()), stop)


PROGRAMS: Sequence[Callable[[Site, Children], Program]] = (
    Convert,
    ConvertEncoded,
    Train,
    Resume,
    Export,
    ExportOver,
    Move,
    Encode,
)


def _files(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}

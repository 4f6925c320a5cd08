"""What was done to a folder, step by step, and what of it a power cut cannot undo.

The rules are those that POSIX promises, and no more: a name is durable when its folder was
synced, bytes and length of a file when the file was, everything when its file system was; all
else may be lost, in any combination. Each mount below the folder is a file system of its own.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from tiering import fsops
from tiering.fsops import Operation

NEVER = 1 << 60
PRODUCT = ("tiering", "checkpoint", "megatrain", "backends")
SYNCS = ("fsync", "fsync folder", "sync")

# A tree is what a folder holds, by path below it: bytes of a file, target of a link, or nothing.
Tree = Mapping[str, bytes | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An operation in time, and where in the program; ``end`` is NEVER if it did not succeed.

    ``device`` is the file system that it syncs.
    """

    operation: Operation
    where: str
    begin: int
    end: int
    device: int

    def __str__(self) -> str:
        return f"{self.operation.action} {'/'.join(self.operation.path.parts[-2:])}"

    def cut(self, time: int) -> Step:
        """Return what is left of it when its process is killed at ``time``."""
        if self.end <= time:
            return self
        return replace(self, end=NEVER if self.operation.action in SYNCS else time)


@dataclass(slots=True, kw_only=True)
class Node:
    """A file, folder or link as it was when the recording began, or new and empty."""

    device: int
    content: bytes | str | None
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """From ``time`` on the outcomes in ``allowed`` are right."""

    time: int
    allowed: Any


class Recording:
    """The steps taken below ``root`` while it was ``running``, and the tree that they began with.

    With ``before``, a recording of a process that was killed, they come after the steps of that.
    """

    def __init__(self, root: Path, before: Recording | None = None) -> None:
        self.root = root
        self.names, self.nodes = (before.names, before.nodes) if before else _snapshot(root)
        self.steps: list[Step] = list(before.steps) if before else []
        self.marks: list[Mark] = list(before.marks) if before else []
        self._clock = before.now if before else 0
        self._guard = threading.Lock()

    @property
    def now(self) -> int:
        """The time of the next event."""
        return self._clock

    @contextmanager
    def running(self) -> Iterator[Recording]:
        """Record what this context does."""
        with fsops.recorded(self._record):
            yield self

    def allow(self, allowed: Any) -> None:
        """Say what a power cut may leave from now on."""
        self.marks.append(Mark(time=self._clock, allowed=allowed))

    def _record(self, operation: Operation) -> Callable[[], None]:
        with self._guard:
            number = len(self.steps)
            device = os.stat(operation.path).st_dev if operation.action == "sync" else 0
            absent = operation.action == "open" and not os.path.lexists(operation.path)
            step = Step(
                operation=operation, where=_caller(), begin=self._tick(), end=NEVER, device=device
            )
            self.steps.append(step)

        def ended() -> None:
            done = replace(operation, action="create") if absent else operation
            with self._guard:
                self.steps[number] = replace(step, operation=done, end=self._tick())

        return ended

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def killed(self, time: int) -> Recording:
        """Return what is recorded of a process that was killed at ``time``.

        What it had begun to change is visible to the next; what it had begun to sync is not synced.
        """
        before = Recording.__new__(Recording)
        before.__dict__.update(self.__dict__)
        before.steps = [step.cut(time) for step in self.steps if step.begin <= time]
        before.marks = [mark for mark in self.marks if mark.time <= time]
        before._clock = time + 1
        return before


def _caller() -> str:
    """Return which function of the product asked for the step that is being recorded."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent.name in PRODUCT and path.name != "fsops.py":
            return f"{path.parent.name}/{path.name} {frame.f_code.co_name.lstrip('_')}"
        frame = frame.f_back
    return "?"


Names = Mapping[tuple[int, str], int]  # (folder, name) -> node; the root is node 0


def _snapshot(root: Path) -> tuple[Names, Sequence[Node]]:
    names: dict[tuple[int, str], int] = {}
    nodes = [Node(device=root.stat().st_dev, content=None, label=".")]

    def visit(folder: Path, number: int) -> None:
        for path in sorted(folder.iterdir()):
            names[number, path.name] = len(nodes)
            node = Node(device=path.lstat().st_dev, content=_content(path), label=path.name)
            nodes.append(node)
            if node.content is None:
                visit(path, len(nodes) - 1)

    visit(root, 0)
    return names, nodes


def _content(path: Path) -> bytes | str | None:
    if path.is_symlink():
        return os.readlink(path)
    return None if path.is_dir() else path.read_bytes()


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Effect:
    """One change that reaches the drive at any time after ``begin``, or never.

    Either ``names`` of ``folder`` come to mean nodes or nothing, or ``node`` gets ``data`` at
    ``offset``, or, without data, the length ``nbytes``. Not without ``needs``.
    """

    text: str
    path: Path
    begin: int
    end: int
    device: int
    folder: int = -1
    names: Mapping[str, int | None] = field(default_factory=dict)
    node: int = -1
    offset: int = 0
    data: bytes = b""
    nbytes: int = -1
    needs: Effect | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """A step that makes durable what ended before it began: of a folder, a file or a drive."""

    step: Step
    folder: int = -1
    node: int = -1
    device: int = -1

    def covers(self, effect: Effect) -> bool:
        """Whether the effect is durable when this has ended."""
        return effect.end < self.step.begin and (
            effect.folder == self.folder >= 0
            or effect.node == self.node >= 0
            or effect.device == self.device
        )


class History:
    """A recording as effects and syncs."""

    def __init__(self, recording: Recording) -> None:
        self.root = recording.root
        self.names = recording.names
        self.nodes = list(recording.nodes)
        self.marks = recording.marks
        self.end = recording.now + 1
        self.effects: list[Effect] = []
        self.syncs: list[Sync] = []
        self._visible = dict(recording.names)
        for step in recording.steps:
            self._take(step)

    def _take(self, step: Step) -> None:
        operation = step.operation
        match operation.action:
            case "create" | "create folder" | "link":
                self._make(step)
            case "remove":
                self._name(step, operation.path, None)
            case "rename":
                self._rename(step)
            case "write":
                if operation.data:
                    self._change(step, offset=operation.offset, data=operation.data)
            case "truncate":
                self._change(step, nbytes=operation.nbytes)
            case "exchange":
                if step.end < NEVER:  # else there is none on this file system
                    self._exchange(step)
            case "reserve":  # what has blocks only reads as before: zeros
                pass
            case "fsync":
                self.syncs.append(Sync(step=step, node=self._node(operation.path)))
            case "fsync folder":
                if operation.path.is_relative_to(self.root):
                    self.syncs.append(Sync(step=step, folder=self._node(operation.path)))
            case "sync":
                self.syncs.append(Sync(step=step, device=step.device))
            case "open" | "close":
                pass
            case _:
                raise ValueError(f"no rule for {operation.action}")

    def _node(self, path: Path) -> int:
        node = 0
        for part in self._below(path).parts:
            node = self._visible[node, part]
        return node

    def _below(self, path: Path) -> Path:
        return path.relative_to(self.root)

    def _place(self, path: Path) -> tuple[int, str]:
        return self._node(path.parent), path.name

    def _make(self, step: Step) -> None:
        operation = step.operation
        if self._place(operation.path) in self._visible:
            return  # only a lock file is opened so
        content = {"create": b"", "create folder": None, "link": operation.source}
        parent = self._node(operation.path.parent)
        node = Node(
            device=self.nodes[parent].device,
            content=content[operation.action],
            label=operation.path.name,
        )
        self.nodes.append(node)
        self._name(step, operation.path, len(self.nodes) - 1)

    def _name(self, step: Step, path: Path, node: int | None, *, text: str = "") -> None:
        folder, name = self._place(path)
        if node is None and (folder, name) not in self._visible:
            return
        self._add(step, folder=folder, names={name: node}, text=text)

    def _rename(self, step: Step) -> None:
        operation = step.operation
        source = Path(operation.source)
        node = self._node(source)
        (old, name), (new, final) = self._place(source), self._place(operation.path)
        if old == new:
            self._add(step, folder=new, names={name: None, final: node})
            return
        installed = self._add(step, folder=new, names={final: node})
        self._add(step, folder=old, names={name: None}, needs=installed, text=f"{step}, old name")

    def _exchange(self, step: Step) -> None:
        (folder, name), (other, final) = map(
            self._place, (Path(step.operation.source), step.operation.path)
        )
        assert folder == other, "no rule for the names of two folders"
        nodes = {name: self._visible[folder, final], final: self._visible[folder, name]}
        self._add(step, folder=folder, names=nodes)

    def _change(self, step: Step, **change: Any) -> None:
        self._add(step, node=self._node(step.operation.path), **change)

    def _add(self, step: Step, *, text: str = "", **change: Any) -> Effect:
        of = change["folder"] if "folder" in change else change["node"]
        effect = Effect(
            text=text or str(step),
            path=step.operation.path,
            begin=step.begin,
            end=step.end,
            device=self.nodes[of].device,
            **change,
        )
        self.effects.append(effect)
        for name, node in effect.names.items():
            if node is None:
                self._visible.pop((effect.folder, name))
            else:
                self._visible[effect.folder, name] = node
        return effect

    # -- other protocols -------------------------------------------------------------------------

    def without(self, sync: Sync) -> History:
        """Return what would have happened without one sync."""
        other = self._copy()
        other.syncs = [kept for kept in self.syncs if kept is not sync]
        return other

    def _copy(self) -> History:
        other = History.__new__(History)
        other.__dict__.update(self.__dict__)
        return other

    # -- time ------------------------------------------------------------------------------------

    def durable_from(self) -> list[int]:
        """Return from which time on each effect cannot be lost any more."""
        times = {
            id(effect): min((s.step.end for s in self.syncs if s.covers(effect)), default=NEVER)
            for effect in self.effects
        }
        for effect in self.effects:
            if effect.needs is not None:
                needed = id(effect.needs)
                times[needed] = min(times[needed], times[id(effect)])
        return [times[id(effect)] for effect in self.effects]

    def points(self) -> list[int]:
        """Return the times at which a power cut may leave something that it did not before."""
        times = {0, *(effect.begin for effect in self.effects)}
        times |= {sync.step.end for sync in self.syncs if sync.step.end < NEVER}
        return sorted(times | {mark.time for mark in self.marks})

    def last_points(self) -> list[int]:
        """Return the points after which less may be lost, or other things are right.

        What a power cut may leave at the points before it may leave there as well.
        """
        ends = {sync.step.end for sync in self.syncs} | {mark.time for mark in self.marks}
        points = self.points()
        return [
            time
            for time, then in itertools.pairwise([*points, NEVER])
            if then in ends or then == NEVER
        ]

    def allowed(self, time: int) -> Any:
        """Return what was said that a power cut may leave at ``time``."""
        return [mark.allowed for mark in self.marks if mark.time <= time][-1]

    def visible(self) -> Tree:
        """Return what was there at the end for every other process."""
        return self.tree([(effect, None) for effect in self.effects])

    def tree(self, chosen: Sequence[tuple[Effect, Part | None]]) -> Tree:
        """Return what is there after some effects, each whole or in part."""
        names = dict(self.names)
        contents: dict[int, bytes] = {}
        for effect, part in chosen:
            if effect.folder >= 0:
                for name, node in effect.names.items():
                    if node is None:
                        names.pop((effect.folder, name), None)
                    else:
                        names[effect.folder, name] = node
            else:
                before = contents.get(effect.node, self.nodes[effect.node].content)
                assert isinstance(before, bytes)
                contents[effect.node] = _changed(before, effect, part)
        return self._walk(names, contents)

    def _walk(self, names: Names, contents: Mapping[int, bytes]) -> Tree:
        children: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), node in names.items():
            children.setdefault(folder, []).append((name, node))
        tree: dict[str, bytes | str | None] = {}
        waiting = [("", 0)]
        while waiting:
            prefix, folder = waiting.pop()
            for name, node in children.get(folder, []):
                content = contents.get(node, self.nodes[node].content)
                tree[prefix + name] = content
                if content is None:
                    waiting.append((f"{prefix}{name}/", node))
        return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What reached the drive of a write: ranges of its bytes, and whether the length did."""

    text: str
    kept: tuple[tuple[int, int], ...]
    lengthened: bool


def _changed(before: bytes, effect: Effect, part: Part | None) -> bytes:
    if not effect.data:
        return before[: effect.nbytes].ljust(effect.nbytes, b"\0")
    ranges = part.kept if part else ((0, len(effect.data)),)
    lengthened = part is None or part.lengthened
    ends = [stop for _, stop in ranges] + ([len(effect.data)] if lengthened else [])
    length = max(len(before), effect.offset + max(ends, default=0) if ends else 0)
    content = bytearray(before.ljust(length, b"\0"))
    for start, stop in ranges:
        content[effect.offset + start : effect.offset + stop] = effect.data[start:stop]
    return bytes(content)


# -- real files ----------------------------------------------------------------------------------


def materialise(tree: Tree, root: Path) -> None:
    """Make ``root`` hold ``tree``; what is mounted below it stays mounted."""
    _clear(root)
    for name in sorted(tree):
        content, path = tree[name], f"{root}/{name}"
        if isinstance(content, bytes):
            with open(path, "xb", buffering=0) as file:
                file.write(content)
        elif content is not None:
            os.symlink(content, path)
        elif not os.path.isdir(path):  # a mount is there already
            os.mkdir(path)


def _clear(folder: Path) -> None:
    for entry in list(os.scandir(folder)):
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
        elif os.path.ismount(entry.path):
            _clear(Path(entry.path))
        else:
            shutil.rmtree(entry.path)

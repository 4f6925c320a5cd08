"""Single changes of the order in which things are made durable, made in the source of functions.

A call that makes something durable, or that comes in order with such calls, is left out; or two
that follow each other are exchanged.
"""

from __future__ import annotations

import ast
import copy
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FILES = (
    "tiering/fsops.py",
    "tiering/generations.py",
    "tiering/writer.py",
    "tiering/resumption.py",
    "tiering/slots.py",
    "tiering/slot_table.py",
    "tiering/creation.py",
    "tiering/schema_files.py",
    "tiering/drives.py",
    "tiering/attaching.py",
    "tiering/moving.py",
    "tiering/copying.py",
    "tiering/space.py",
    "tiering/lock.py",
    "tiering/ownership.py",
    "tiering/reader.py",
    "tiering/recordio.py",
    "tiering/backends/posix.py",
    "tiering/backends/kvikio.py",
    "tiering/backends/zarr3.py",
    "checkpoint/recode.py",
    "checkpoint/retention.py",
    "checkpoint/convert.py",
    "checkpoint/formats/hf_writer.py",
    "megatrain/metrics.py",
    "megatrain/stores.py",
)

# -- what is a step --------------------------------------------------------------------------------

SYNCS = {"fsync_file", "fsync_open", "fsync_dir", "sync_drive", "fsync", "fdatasync", "syncfs"}
NAMES = {
    *("replace", "replace_file", "exchange", "symlink"),
    *("unlink", "remove_dir", "remove_tree", "finish"),
}
BYTES = {"write_file", "create_file", "create_sparse", "make_dir", "truncate", "reserve"}
WAITS = {"result", "exception", "ended"}
LOCKS = {  # what stands for a lock that is not taken
    "StoreLock": "__import__('io').BytesIO()",
    "claim": "__import__('os').open({0}, 0)",
    "hold": "__import__('os').open({0}, 0)",
    "is_held": "False",
    "_acquire": "True",
    "_flock": "True",
}
STEPS = SYNCS | NAMES | BYTES | {"rewrite_in_place", "begin_write"}
RECEIVERS = re.compile(
    r"(fsops|lock|space|os|libc|self|self\._slots|self\._file|self\._files|self\._plain|writer|mover"
    r"|copier|self\._writer|\w*\.?_?backends\[.*\]|recordio)$"
)
OF_SYNCS = {"_sync_drives", "_sync_all", "_finish", "settle_slot", "settle_removal", "close"}
LEFT_OUT = SYNCS | OF_SYNCS | (NAMES - {"symlink"}) | WAITS | {"write_file", "reap"}


# -- changes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A file with one change in one function, and what it is in words."""

    file: str
    function: str
    line: int
    text: str
    source: str

    @property
    def where(self) -> str:
        return f"{self.file} {self.function}"

    def is_one_of(self, names: Sequence[str]) -> bool:
        return not names or any(
            name == self.file or re.search(rf"(^|\.)_?{re.escape(name)}$", self.function)
            for name in names
        )


def all_changes() -> Iterator[Change]:
    trees = {file: ast.parse((ROOT / file).read_text()) for file in FILES}
    steps = durable_functions(trees.values())
    for file, tree in trees.items():
        for name, function in functions(tree):
            yield from changes_of(file, tree, name, function, steps)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def durable_functions(trees: Iterable[ast.AST]) -> set[str]:
    """Return the names of all functions that take a step, by others or themselves."""
    calls: dict[str, set[str]] = {}
    for tree in trees:
        for name, function in functions(tree):
            calls.setdefault(name.rpartition(".")[2], set()).update(called(function))
    found = STEPS | set(LOCKS)
    while more := {name for name, inner in calls.items() if inner & found} - found:
        found |= more
    return found


def called(node: ast.AST) -> Iterator[str]:
    """Yield the names of the functions of the product that a piece of code calls."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and (name := callee(inner)):
            yield name


def callee(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Name):  # replace with keywords is that of dataclasses
        return None if call.func.id == "replace" and call.keywords else call.func.id
    if isinstance(call.func, ast.Attribute) and (
        call.func.attr in WAITS or RECEIVERS.match(ast.unparse(call.func.value))
    ):
        return call.func.attr
    return None


def changes_of(
    file: str, tree: ast.Module, name: str, function: ast.FunctionDef, steps: set[str]
) -> Iterator[Change]:
    def change(node: ast.stmt, text: str) -> Change:
        source = ast.unparse(ast.fix_missing_locations(tree))
        return Change(file=file, function=name, line=node.lineno, text=text, source=source)

    for block in blocks(function):
        for number, statement in enumerate(block):
            for call in left_out(statement):
                block[number] = copy.deepcopy(statement)
                text = leave_out(block, number, call)
                yield change(statement, text)
                block[number] = statement
        for one, other in neighbours(block, steps):
            text = f"`{short(block[other])}` before `{short(block[one])}`"
            block[one], block[other] = block[other], block[one]
            yield change(block[other], text)
            block[one], block[other] = block[other], block[one]
    for node in ast.walk(function):
        if isinstance(node, ast.With):
            for at in range(len(node.items) - 1):
                if all(set(called(item)) & steps for item in node.items[at : at + 2]):
                    node.items[at : at + 2] = node.items[at : at + 2][::-1]
                    pair = [ast.unparse(item) for item in node.items[at : at + 2]]
                    yield change(node, f"with `{pair[0]}` before `{pair[1]}`")
                    node.items[at : at + 2] = node.items[at : at + 2][::-1]


def blocks(node: ast.AST) -> list[list[ast.stmt]]:
    found = []
    for inner in ast.walk(node):
        for part in ("body", "orelse", "finalbody"):
            block = getattr(inner, part, None)
            if isinstance(block, list) and block:
                found.append(block)
    return found


def own_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls of a statement that are not in a block of its own."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.ExceptHandler):
                waiting.append(child)


def left_out(statement: ast.stmt) -> list[int]:
    """Return which of the calls of a statement can be left out, by their place among all."""
    return [
        number
        for number, call in enumerate(own_calls(statement))
        if (name := callee(call)) in LEFT_OUT | set(LOCKS)
        and (isinstance(statement, ast.Expr) or name in {*LOCKS, "syncfs", "result", "exchange"})
        and not (name == "result" and "piece" in ast.unparse(call))
        and not (name == "close" and "self._file." not in ast.unparse(call))
    ]


def leave_out(block: list[ast.stmt], number: int, place: int) -> str:
    """Leave one call out and say so."""
    statement = block[number]
    call = list(own_calls(statement))[place]
    text, name = short(call), callee(call)
    if name == "write_file":
        if isinstance(call.func, ast.Attribute):
            call.func.attr = "create_file"
        else:
            call.func = ast.Name("create_file", ast.Load())
        return f"`{text}` without its fsync"
    if name in LOCKS:
        arguments = [ast.unparse(argument) for argument in call.args]
        substitute(statement, call, LOCKS[name].format(*arguments, ""))
    elif name in ("syncfs", "exchange"):
        substitute(statement, call, "0" if name == "syncfs" else "False")
    elif name == "result" and not (isinstance(statement, ast.Expr) and statement.value is call):
        substitute(statement, call, "0")
    else:
        block[number] = ast.copy_location(ast.Pass(), statement)
    return f"without `{text}`"


def substitute(statement: ast.stmt, call: ast.Call, text: str) -> None:
    replacement = ast.parse(text, mode="eval").body
    for node in ast.walk(statement):
        for part, value in ast.iter_fields(node):
            if value is call:
                setattr(node, part, replacement)
            elif isinstance(value, list) and call in value:
                value[value.index(call)] = replacement


def neighbours(block: list[ast.stmt], steps: set[str]) -> Iterator[tuple[int, int]]:
    """Yield which statements of a block take steps that follow each other and can be exchanged."""
    places = [n for n, statement in enumerate(block) if takes_steps(statement, steps)]
    for one, other in itertools.pairwise(places):
        between = block[one + 1 : other]
        runs = not (
            bound([block[one], *between]) & used([block[other]])
            or bound([block[one]]) & used(between)
            or bound(between) & used([block[one]])
            or bound([block[other]]) & used([block[one], *between])
        )
        if runs and ast.dump(block[one]) != ast.dump(block[other]):
            yield one, other


def takes_steps(statement: ast.stmt, steps: set[str]) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.Return | ast.Raise):
        return False
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(statement))
    return yields or bool(set(called(statement)) & (steps | WAITS))


def bound(statements: Sequence[ast.stmt]) -> set[str]:
    return names(statements, ast.Store)


def used(statements: Sequence[ast.stmt]) -> set[str]:
    return names(statements, ast.Load)


def names(statements: Sequence[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    found = (node for statement in statements for node in ast.walk(statement))
    return {n.id for n in found if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return (text.splitlines()[0] + (" ..." if "\n" in text else ""))[:90]

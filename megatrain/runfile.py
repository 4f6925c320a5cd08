"""YAML with places: reads a run file, applies ``--set``, and says where a mistake stands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tiering.errors import NOT_THERE, StorageError, UsageError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_FOREIGN = {  # what other trainers call it; no spelling distance finds these
    "batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.accumulate",
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "lr_scheduler_type": "train.schedule",
    "gradient_clipping": "train.max_grad_norm",
    "output_dir": "out",
    "model_name_or_path": "model",
    "dataset": "data.train",
    "seq_len": "data.max_seq_len",
    "max_length": "data.max_seq_len",
}


class _Loader(yaml.SafeLoader):
    """YAML 1.1, in which also ``1e-5`` is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+"),
    list("-+.0123456789"),
)


@dataclass(slots=True)
class Places:
    """Where each dotted key was written, for messages."""

    source: str
    lines: dict[str, int] = field(default_factory=dict)
    sets: dict[str, str] = field(default_factory=dict)

    def of(self, key: str) -> str:
        """Return the place of ``key``, or of the nearest section around it."""
        for name, assignment in self.sets.items():
            if key == name or name.startswith(f"{key}."):
                return f"--set {assignment}"
        while key:
            if key in self.sets:
                return f"--set {self.sets[key]}"
            if key in self.lines:
                return f"{self.source}:{self.lines[key]}"
            key = key.rpartition(".")[0]
        return self.source


def read(path: Path) -> tuple[dict[str, Any], Places]:
    """Return the document at ``path`` and where its keys stand."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except NOT_THERE as error:
        raise UsageError(f"cannot read run file {path}: {error.strerror}") from error
    except OSError as error:
        raise StorageError("read", path, errno=error.errno or 0) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a run file: not UTF-8 text") from error
    document = _parse(text, str(path))
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not a run file: expected keys such as model, data and out")
    places = Places(str(path))
    for key, line in _keys(yaml.compose(text, Loader=_Loader), ""):
        if key in places.lines:
            raise UsageError(
                f"{path}:{line}: {key} stands twice, first in line {places.lines[key]}"
            )
        places.lines[key] = line
    return document, places


def put(document: dict[str, Any], assignment: str, places: Places) -> None:
    """Set the dotted key of ``key=value`` in ``document``; the value is read as YAML."""
    key, equals, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UsageError(f"--set {assignment}: expected key=value, as in train.lr=1e-5")
    section = document
    for part in parts[:-1]:
        inner = section.get(part)
        if inner is None:
            inner = section[part] = {}
        if not isinstance(inner, dict):
            raise UsageError(f"--set {assignment}: {part} is a value, not a section")
        section = inner
    section[parts[-1]] = _parse(text, f"--set {assignment}")
    places.sets[".".join(parts)] = assignment


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}:{mark.line + 1}" if mark and not source.startswith("--") else source
        raise UsageError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{source}: not valid YAML: {reason}") from error


def _keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        yield key, key_node.start_mark.line + 1
        if prefix.count(".") < 2:  # run files have two levels; an alias may nest without end
            yield from _keys(value_node, key + ".")


def explain(error: ValidationError, places: Places, known: Sequence[str]) -> str:
    """Return one line for each key that is wrong: its place, what is wrong, the way out."""
    wrong: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        key = _dotted(detail, known)
        wrong.setdefault(key, []).append(_sentence(detail, key, known))
    return "\n".join(
        f"{places.of(key)}: {key} {' or '.join(dict.fromkeys(sentences))}"
        for key, sentences in wrong.items()
    )


def _dotted(detail: ErrorDetails, known: Sequence[str]) -> str:
    """Return the dotted key, without pydantic's names for the members of a union."""
    parts = [str(part) for part in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        return ".".join(parts)
    while len(parts) > 1 and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts)


def _sentence(detail: ErrorDetails, key: str, known: Sequence[str]) -> str:
    """Return what follows the key in a message."""
    text, found = detail["msg"], f"found {detail['input']!r}"
    match detail["type"]:
        case "extra_forbidden":
            return f"is an unknown key; the nearest known key is {nearest(key, known)}"
        case "missing":
            return "is missing"
        case "model_type" | "model_attributes_type":
            return f"is a section: expected keys under it, {found}"
        case "tuple_type":
            return f"must be a list ({found})"
        case "value_error":
            return f"is wrong: {text.removeprefix('Value error, ')}"
        case _:
            return f"{text.replace('Input should be', 'must be')} ({found})"


def nearest(key: str, known: Sequence[str]) -> str:
    """Return the known key most like ``key``; one in the same section wins a tie."""
    section, _, word = key.rpartition(".")
    if word in _FOREIGN:
        return _FOREIGN[word]

    def likeness(candidate: str) -> float:
        home, _, name = candidate.rpartition(".")
        ratio = difflib.SequenceMatcher(None, word, name).ratio()
        return ratio + (0.15 if home == section else 0.0)

    return max(known, key=likeness)

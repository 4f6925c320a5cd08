"""Which tensor of a source is which of the model. Pure; names and shapes in, a match out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from checkpoint.names import Expected
from tiering.errors import RefusedError

_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_forward_module.")
"""What torch.compile, DataParallel, FSDP and DeepSpeed put in front of names."""

_LEFTOVER = re.compile(
    r"(.+\.)?("
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|(attn|attention|self_attn|self_attention)\.(bias|masked_bias)"
    r"|rotary_pos_emb\.inv_freq"
    r"|position_ids"
    r")"
)
"""Buffers that older versions of transformers saved and that no model of today loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The source name of everything the model expects, and of what is only carried along.

    ``parameters``, ``aliases`` and ``carried`` map names of the model to names of the source.
    """

    parameters: Mapping[str, str]
    aliases: Mapping[str, str]
    carried: Mapping[str, str]
    stripped: str = ""
    added: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to names, for the user."""
        notes = []
        if self.stripped:
            notes.append(f"every name began with {self.stripped!r}; it was removed")
        if self.added:
            notes.append(f"names lacked {self.added!r}; it was put in front of them")
        if self.carried:
            notes.append(f"carried along, not trained: {_listed(self.carried, limit=4)}")
        return tuple(notes)


def match_names(expected: Expected, source: Collection[str], where: str) -> Match:
    """Return which name of ``source`` belongs to what the model expects.

    Raises:
        RefusedError: Something that the model expects is not there, or something is there that
            it does not know.
    """
    known = _known(expected)
    base = f"{expected.base_prefix}." if expected.base_prefix else ""
    stripped = _shared_prefix(source, known, base)
    short = {name.removeprefix(stripped): name for name in source}
    added = base if base and not any(name.startswith(base) for name in short) else ""
    final = {name if name in known else added + name: full for name, full in short.items()}
    extra = [name for name in final if name not in known]
    carried = [name for name in extra if _is_carried(name, expected)]
    missing = [name for name in _required(expected) if name not in final]
    unexpected = [final[name] for name in extra if name not in carried]
    if missing or unexpected:
        raise RefusedError(_unmatched(where, expected, source, missing, unexpected))
    return Match(
        parameters={parameter.name: final[parameter.name] for parameter in expected.parameters},
        aliases={name: final[name] for name in expected.aliases if name in final},
        carried={name: final[name] for name in (*expected.buffers, *carried)},
        stripped=stripped,
        added=added if any(name in final and name not in short for name in known) else "",
    )


def check_shapes(
    wanted: Mapping[str, Sequence[int]],
    found: Mapping[str, tuple[str, Sequence[int]]],
) -> None:
    """Refuse the first shape that is not the model's.

    ``found`` maps each name to the file and the shape that the source has.
    """
    wrong = [name for name in wanted if tuple(wanted[name]) != tuple(found[name][1])]
    if wrong:
        file, shape = found[wrong[0]]
        more = f"; {len(wrong) - 1} more shapes differ" if len(wrong) > 1 else ""
        raise RefusedError(
            f"{file}: tensor {wrong[0]} has shape {list(shape)}, expected "
            f"{list(wanted[wrong[0]])} by config.json{more}"
        )


def _known(expected: Expected) -> frozenset[str]:
    parameters = (parameter.name for parameter in expected.parameters)
    return frozenset((*parameters, *expected.aliases, *expected.buffers))


def _required(expected: Expected) -> list[str]:
    return [*(parameter.name for parameter in expected.parameters), *expected.buffers]


def _is_carried(name: str, expected: Expected) -> bool:
    if name in expected.transient or _LEFTOVER.fullmatch(name):
        return True
    return any(re.fullmatch(rf"(.*\.)?(?:{pattern})(\..*)?", name) for pattern in expected.ignored)


def _shared_prefix(source: Collection[str], known: Collection[str], base: str) -> str:
    """Return what all names share in front of the names that the model knows, or nothing."""
    names, prefix = list(source), ""
    while names and not any(name in known or base + name in known for name in names):
        head = names[0].split(".")[0] + "."
        if not all(name.startswith(head) for name in names):
            return ""
        prefix += head
        names = [name.removeprefix(head) for name in names]
    return prefix


def _unmatched(
    where: str,
    expected: Expected,
    source: Collection[str],
    missing: Sequence[str],
    unexpected: Sequence[str],
) -> str:
    wanted = len(_required(expected))
    parts = [
        f"{where}: matched {wanted - len(missing)} of the {wanted} tensors that "
        f"{expected.model_type} expects"
    ]
    if missing:
        parts.append(f"missing {len(missing)}: {_listed(missing)}")
    if unexpected:
        parts.append(f"unexpected {len(unexpected)}: {_listed(unexpected)}")
    for wrapper in _WRAPPERS:
        if count := sum(name.startswith(wrapper) for name in source):
            parts.append(f"{count} of {len(source)} names begin with {wrapper!r}")
    return "; ".join(parts)


def _listed(names: Iterable[str], limit: int = 3) -> str:
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest

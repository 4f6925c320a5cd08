"""Blocks of commands on a page, and what it claims that they say and end with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CLAIM = re.compile(r"^(?P<command>.*\S)\s+# exits (?P<code>\d+)(: (?P<text>.*))?$")
_PATH = re.compile(r"(?<![\w.~$}%/>-])/[\w.*/-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block; ``says`` is what the page shows of its output, "" if nothing.

    Attributes:
        section: The heading of the second level that it stands under.
        line: Where it begins on the page.
    """

    section: str
    language: str
    text: str
    line: int
    says: str = ""

    def claims(self) -> Iterator[str]:
        """Yield what must be found in the output, one after the other."""
        for line in self.text.splitlines():
            if (match := _CLAIM.match(line)) and match["text"]:
                yield match["text"]
        yield from self.says.splitlines()

    def script(self, not_here: Mapping[str, str]) -> str:
        """Return what a shell is to run, without the programs in ``not_here``.

        It ends at the first command that does not end as the page says: with 0, if it says nothing.
        """
        lines = (_checked(line, not_here) for line in self.text.splitlines())
        return "set -euo pipefail\n" + "\n".join(lines) + "\n"


def _checked(line: str, not_here: Mapping[str, str]) -> str:
    if program(line) in not_here:
        return ":"
    if match := _CLAIM.match(line):
        code = match["code"]
        return (
            f"if {match['command']}; then found=0; else found=$?; fi\n"
            f'[ $found = {code} ] || {{ echo "ended with $found, not {code}" >&2; exit 99; }}'
        )
    return line


def program(line: str) -> str:
    """Return the program that a line begins with, or "" if it is none that can be told."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a line of something longer
        words = line.split()
    return next((word for word in words if word != "sudo"), "")


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, each with the output that follows it."""
    text = page.read_text()
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        headings = re.findall(r"^## (.*)$", text[: match.start()], re.MULTILINE)
        block = Block(
            section=headings[-1] if headings else "",
            language=match[1],
            text=match[2],
            line=text.count("\n", 0, match.start()) + 1,
        )
        if block.language == "text":
            before = found.pop()
            assert before.language == "bash", f"line {block.line}: the output of nothing"
            block = Block(
                section=before.section,
                language="bash",
                text=before.text,
                line=before.line,
                says=block.text,
            )
        found.append(block)
    return found


def absolute_paths(text: str) -> set[str]:
    """Return the absolute paths that a script names, comments apart."""
    code = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines())
    return set(_PATH.findall(code))


def missing(claims: Iterator[str], output: str) -> str:
    """Return the first claim that is not found in its turn, or "".

    ``...`` stands for anything; white space does not count.
    """
    said, at = " ".join(output.split()), 0
    for claim in claims:
        parts = [re.escape(" ".join(part.split())) for part in claim.split("...")]
        match = re.compile(".*?".join(parts)).search(said, at)
        if match is None:
            return claim
        at = match.end()
    return ""

"""Something tried in a process of its own, which it may crash or hang."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import megatrain

_PATIENCE_S = 60


class TrialError(Exception):
    """It did not go well; the message says how it ended."""


def run(code: str, *arguments: str) -> str:
    """Return what Python's ``code`` prints.

    Raises:
        TrialError: It failed, was killed or did not end.
    """
    home = str(Path(megatrain.__file__).resolve().parents[1])
    # where this process looks, but not in what happens to be the current folder
    path = [*filter(None, sys.path), home]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"import sys\nsys.path[:] = {path!r}\n{code}", *arguments],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TrialError(f"did not end within {_PATIENCE_S} s") from error
    if done.returncode < 0:
        raise TrialError(f"was killed by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise TrialError(last[0])
    return done.stdout

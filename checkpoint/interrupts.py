"""Ctrl-C that works: a command asked twice to end does end, whatever its threads wait for.

Python runs signal handlers in the main thread only, between two of its steps, and joins every
thread before it exits. A thread inside a system call that does not return would keep it for ever.
"""

from __future__ import annotations

import os
import signal
import socket
import threading

EXIT_INTERRUPTED = 130
GRACE_S = 5.0
_ASKING = frozenset({signal.SIGINT, signal.SIGTERM})
_MESSAGE = b"\nerror: interrupted; left without waiting for operations that do not end\n"


def install(grace_s: float = GRACE_S) -> None:
    """From now on SIGTERM interrupts like SIGINT, and the second ends the process, with 130.

    Handlers have ``grace_s`` then to end in good order, also those that replace these later. The
    third ends it at once. Call it from the main thread, once, when a command begins.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # that would leave what was being made
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(
        target=_count, args=(ours, theirs, grace_s), name="signals", daemon=True
    ).start()


def _count(ours: socket.socket, theirs: socket.socket, grace_s: float) -> None:
    """Wait for signals; ``theirs`` is held here, so that it stays open as long as the process."""
    asked = 0
    try:
        while asked < 3:
            asked += sum(number in _ASKING for number in ours.recv(64))
            if asked == 2:
                ours.settimeout(grace_s)
    except TimeoutError:
        pass
    os.write(2, _MESSAGE)
    os._exit(EXIT_INTERRUPTED)

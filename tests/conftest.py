"""What holds for every test."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has SIGINT ignored, which children would inherit:
# tests that interrupt a command need it to arrive.
signal.signal(signal.SIGINT, signal.default_int_handler)

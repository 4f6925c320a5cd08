"""Makes a store like the one in tests/data/golden: python -m scripts.make_golden OUT

The one in git was made once and stays: what was written in a format is read in every later version.
A new format gets a folder of its own beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.golden import make

if __name__ == "__main__":
    make(Path(sys.argv[1]))

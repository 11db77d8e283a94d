"""Where Python processes that tests start look for modules."""

from __future__ import annotations

import os
from pathlib import Path


def python_path(*folders: str | Path) -> str:
    """`folders`, and after them those of this process: what the tests need may be installed there alone."""
    others = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([*map(str, folders), *others])

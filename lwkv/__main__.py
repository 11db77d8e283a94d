"""`python -m lwkv` is the `lwkv` command."""

from __future__ import annotations

import sys

from lwkv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

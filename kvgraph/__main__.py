"""`python -m kvgraph` is `kvgraph`."""

from __future__ import annotations

import sys

from kvgraph.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""The module that draws the figures of the benchmarks, for the site and for the results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_SITE = Path(__file__).resolve().parents[1] / "tools" / "site"


def figures() -> Any:
    """Return the module; it imports matplotlib."""
    sys.path.insert(0, str(_SITE))
    import figures

    return figures

"""Puts the harness of the benches on the path. A campaign imports this first."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

sys.path[1:1] = [str(ROOT / "bench"), str(ROOT / "tests")]

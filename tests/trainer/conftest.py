"""What the rooms below share (`trainer_testing`, `toy_environment`) can be imported in them, and so can their tests.

Many of them hold one thing to another that a neighbour tries: the meshes, the families, what is saved and published.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOMS = ("batch", "memory", "parallel", "publish", "state", "step", "supervised", "warmup")

sys.path += [str(Path(__file__).parent / room) for room in _ROOMS]

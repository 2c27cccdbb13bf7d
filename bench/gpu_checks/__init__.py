"""The parts of `gpu_session.py`: each is a list of checks, in the order of what they tell a first session."""

from __future__ import annotations

from gpu_checks.check import Check
from gpu_checks.copies import COPIES
from gpu_checks.correctness import CORRECTNESS
from gpu_checks.kernels import KERNELS
from gpu_checks.stack import WHOLE
from gpu_checks.whole_run import RUN

__all__ = ["PARTS"]

PARTS: dict[str, tuple[Check, ...]] = {
    "correctness": CORRECTNESS,
    "kernels": KERNELS,
    "whole": (*WHOLE, *COPIES, *RUN),
}

"""Where tests find an interpreter with a real vLLM: ``HPCRL_VLLM_PYTHON``, else ``.venv-vllm`` of the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_OWN = _ROOT / ".venv-vllm"
_GIVEN = Path(os.environ.get("HPCRL_VLLM_PYTHON") or _OWN / "bin" / "python")
# the stamp is written last: an installation that failed is none
_WHOLE = (_OWN / "hpcrl-bootstrap").is_file() or not _GIVEN.is_relative_to(_OWN)
VLLM_PYTHON = _GIVEN if _WHOLE and _GIVEN.is_file() else None
SKIPPED = "no vLLM on this machine"


def skip_without_vllm(items: list[pytest.Item]) -> None:
    """Skip tests of the marker `vllm` where there is none."""
    reason = f"{SKIPPED}: python3 tools/bootstrap.py --vllm, or HPCRL_VLLM_PYTHON"
    for item in items:
        if VLLM_PYTHON is None and item.get_closest_marker("vllm") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))

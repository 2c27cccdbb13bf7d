"""``python -m hpcrl.inference.embedded.server``: the embedded engine behind vLLM's HTTP API."""

from __future__ import annotations

import sys

from hpcrl.processes.interpreter import bound_kernel_caches, lasting_imports


def main() -> int:
    """Serve until SIGTERM."""
    bound_kernel_caches()
    with lasting_imports():
        from hpcrl.inference.embedded.serving.process import main as serve  # noqa: PLC0415 - imports torch

    return serve()


if __name__ == "__main__":
    sys.exit(main())

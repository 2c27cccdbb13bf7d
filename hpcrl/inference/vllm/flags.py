"""``python -m hpcrl.inference.vllm.flags``: whether the installed vLLM takes command lines.

Reads a JSON list of them from stdin, of each the words after the program's name. Uses vLLM's own parser and its own
checks between flags; no model is read, no device is touched. Prints ``{"version": ..., "refused": [...]}``: of each
command line what vLLM says against it, or null.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from typing import Any


def main() -> int:
    """Check the command lines on stdin."""
    lines: list[list[str]] = json.load(sys.stdin)
    logging.disable(logging.WARNING)
    from vllm import __version__  # noqa: PLC0415
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    # a shortened name could become another flag with the next version
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm", allow_abbrev=False))
    print(json.dumps({"version": __version__, "refused": [_refusal(parser, words) for words in lines]}))
    return 0


def _refusal(parser: Any, words: list[str]) -> str | None:
    """Return vLLM's error about a command line, as one line; None if it accepts it."""
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args  # noqa: PLC0415

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = parser.parse_args(words)
        validate_parsed_serve_args(arguments)
    except SystemExit as error:
        return (said.getvalue().strip().splitlines() or [f"exit code {error.code}"])[-1]
    except (TypeError, ValueError) as error:
        return f"vllm: error: {error}"
    return None


if __name__ == "__main__":
    sys.exit(main())

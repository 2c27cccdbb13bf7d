"""``python -m hpcrl.inference.vllm.flags``: whether the installed vLLM takes a command line.

Reads a JSON list from stdin, the words after the program's name. Uses vLLM's own parser and its own checks between
flags; no model is read, no device is touched. Prints ``{"version": ...}`` where all is well; else what vLLM says goes
to stderr, and the exit code is 2.
"""

from __future__ import annotations

import json
import logging
import sys

__all__ = ["main"]


def main() -> int:
    """Check the command line on stdin."""
    words: list[str] = json.load(sys.stdin)
    logging.disable(logging.WARNING)
    from vllm import __version__  # noqa: PLC0415
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    # a shortened name could become another flag with the next version
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm", allow_abbrev=False))
    arguments = parser.parse_args(words)
    try:
        validate_parsed_serve_args(arguments)
    except (TypeError, ValueError) as error:
        print(f"vllm: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"version": __version__}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

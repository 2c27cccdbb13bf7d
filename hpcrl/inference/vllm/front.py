"""``python -m hpcrl.inference.vllm.front … -- COMMAND``: the router that leads requests from prefill to decode.

It takes engines at its start alone. So it is started when both sides are ready, and learns from the attempt's endpoints
where they are; then it becomes COMMAND. Whenever it is started again it looks again, and gets no engine that the
orchestrator leaves out (`hpcrl.rollouts.engines.disaggregated_pool`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from hpcrl.errors import HpcrlError
from hpcrl.runs.role import Endpoints, RoleContext, read_left_out, run_role


def _parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpcrl.inference.vllm.front")
    parser.add_argument("--connector", choices=("mooncake", "nixl"), required=True)
    parser.add_argument("--bootstrap-offset", type=int, help="offset of prefill's Mooncake port to that of its server")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def front_flags(
    connector: str, prefill: Sequence[str], decode: Sequence[str], *, bootstrap_offset: int | None
) -> list[str]:
    """Return vllm-router's flags for engines at these URLs.

    Raises
    ------
    HpcrlError
        A side has no engine.
    """
    for side, urls in (("prefill", prefill), ("decode", decode)):
        if not urls:
            raise HpcrlError(f"the router has no {side} engines: the attempt's endpoints name none")
    words = ["--vllm-pd-disaggregation", "--kv-connector", connector]
    for url in prefill:
        port = (urlsplit(url).port or 0) + bootstrap_offset if bootstrap_offset is not None else "none"
        words += ["--prefill", url, str(port)]
    for url in decode:
        words += ["--decode", url]
    return words


def servers_of(endpoints: Endpoints, role: str, left_out: Collection[str] = ()) -> list[str]:
    """Return URLs of all servers of a side but of engines ``left_out``: each rank of a replica has its own server."""
    members = [member for member in endpoints.fixed(role) if f"{role}-{member.replica}" not in left_out]
    return [url for member in members for url in (member.servers or (member.url,))]


def main(context: RoleContext) -> None:
    """Read the engines' addresses, then exec the router."""
    settings = _parse()
    left_out = read_left_out(context.run, context.attempt)
    flags = front_flags(
        settings.connector,
        servers_of(context.endpoints(), "prefill", left_out),
        servers_of(context.endpoints(), "decode", left_out),
        bootstrap_offset=settings.bootstrap_offset,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(settings.command[0], [*settings.command, *flags])


if __name__ == "__main__":
    run_role(main)

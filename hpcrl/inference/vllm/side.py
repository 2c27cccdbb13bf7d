"""``python -m hpcrl.inference.vllm.side … -- COMMAND``: a prefill or decode engine that others can reach for its KV.

By default connectors listen on loopback, or on the address of the default route, and all engines of a machine on one
port. This says which address of this node the others see, and which port is its own; then it becomes COMMAND.
"""

from __future__ import annotations

import argparse
import os
import sys

from hpcrl.network.interfaces import address_towards


def _parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpcrl.inference.vllm.side")
    parser.add_argument("--connector", choices=("mooncake", "nixl"), required=True)
    parser.add_argument("--towards", required=True, help="a host of the network over which KV is transferred")
    parser.add_argument("--port", type=int, required=True, help="first port of this node for the connector")
    parser.add_argument("--ranks-before", type=int, default=0, help="ranks of the replica on nodes before this one")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def variables(connector: str, *, address: str, port: int, ranks_before: int) -> dict[str, str]:
    """Return the environment variables of a connector that vLLM reads.

    Parameters
    ----------
    address:
        Address of this node.
    port:
        First port that is free for the connector.
    ranks_before:
        Ranks of the replica on earlier nodes. vLLM adds the index of a rank in the replica to NIXL's port, so they are
        subtracted.
    """
    if connector == "mooncake":
        return {"VLLM_HOST_IP": address, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)}
    own = {"VLLM_NIXL_SIDE_CHANNEL_HOST": address, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port - ranks_before)}
    return {"VLLM_HOST_IP": address, **own}


def main() -> None:
    """Report the address, then exec the engine."""
    settings = _parse()
    # the supervisor sets the address of this node that the run uses
    address = os.environ.get("VLLM_HOST_IP") or address_towards(settings.towards)
    own = variables(settings.connector, address=address, port=settings.port, ranks_before=settings.ranks_before)
    for name, value in own.items():
        # the site's word counts more
        os.environ.setdefault(name, value)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(settings.command[0], settings.command)


if __name__ == "__main__":
    main()

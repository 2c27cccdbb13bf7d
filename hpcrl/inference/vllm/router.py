"""``python -m hpcrl.inference.vllm.router …``: vllm-router behind the run's token; its flags are vllm-router's own.

It answers those alone whom a URL of our choice approves of, and asks that once for each token. The URL is a server
of ours, on loopback and in a process of its own (the router does not let other threads of Python run). Nothing but its
``Authorization`` header reaches engines in all modes, which is why token and attempt are both in there:

- without sides, requests reach engines with the headers of the client; paths that it does not know, and its health
  checks, without any. An engine refuses the first, and answers ``GET /health`` to everybody.
- between sides, the router speaks in its own name, with what it calls OPENAI_API_KEY.

An API key of the router's own (``--api-key``) would be wrong: it would vouch for whatever is sent to paths that it does
not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

from aiohttp import web

from hpcrl.daemon_threads import run_process
from hpcrl.errors import ExitCode, HpcrlError
from hpcrl.gate import Gate
from hpcrl.log_format import start_logging
from hpcrl.pending_connections import raise_descriptor_limit
from hpcrl.runs.refusals import gate_from_env
from hpcrl.serving import listen, make_runner

__all__ = ["doorkeeper_app", "main"]

_PATH = "/approve"
_HOST = "127.0.0.1"
_LOOK_S = 1.0
_SPEAKS_AS = "OPENAI_API_KEY"
"""What the router takes its own token from, where it speaks in its own name. It is set in this process alone."""


def doorkeeper_app(gate: Gate) -> web.Application:
    """200 for who may use the router."""

    async def approve(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(middlewares=[gate.middleware()])
    app.add_routes([web.get(_PATH, approve)])
    return app


async def _keep_door(listener: socket.socket, gate: Gate, router: int) -> None:
    """Serve as long as the router is there."""
    runner = make_runner(doorkeeper_app(gate))
    await runner.setup()
    await listen(runner, gate.pending, listener)
    while os.getppid() == router:
        await asyncio.sleep(_LOOK_S)


def _start_doorkeeper(gate: Gate) -> str:
    """Start the process that knows the token; the URL at which it is asked."""
    listener = socket.create_server((_HOST, 0))
    port, router = listener.getsockname()[1], os.getpid()
    if os.fork() == 0:
        # a signal to the router's group is the router's; this ends with it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                run_process(_keep_door(listener, gate, router))
        finally:
            os._exit(0)
    listener.close()
    return f"http://{_HOST}:{port}{_PATH}"


def main(argv: list[str] | None = None) -> int:
    """Become the router.

    Returns
    -------
    int
        0 after SIGTERM, 2 where it would answer everybody, or the token cannot be read.
    """
    from vllm_router import router as vllm_router  # noqa: PLC0415 - of the engines' environment
    from vllm_router.launch_router import launch_router, parse_router_args  # noqa: PLC0415

    start_logging("%(levelname)s %(message)s")
    settings = parse_router_args(sys.argv[1:] if argv is None else argv)
    raise_descriptor_limit()
    # whatever the user has in there is for somebody else
    os.environ.pop(_SPEAKS_AS, None)
    try:
        gate = gate_from_env("router")
        gate.check_host(settings.host)
    except HpcrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USAGE
    if gate.credentials is not None:
        url, core = _start_doorkeeper(gate), vllm_router._Router
        # the option exists in the core, and is missing among those of the Python package
        vllm_router._Router = lambda **options: core(api_key_validation_urls=[url], **options)
        os.environ[_SPEAKS_AS] = gate.credentials.bearer
    launch_router(settings)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())

"""``python -m hpcrl.inference.vllm.router …``: vllm-router behind the run's token; its flags are vllm-router's own.

The router answers only tokens that an approval URL accepts, and asks it once for each token. hpcrl serves this URL
on loopback, in a process of its own (the router does not let other threads of Python run). Only the
``Authorization`` header reaches engines in all modes, which is why token and attempt are both in there:

- without sides, requests reach engines with the headers of the client; paths that it does not know, and its health
  checks, without any. An engine refuses the first, and answers ``GET /health`` without a token.
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

from hpcrl.errors import ExitCode, HpcrlError
from hpcrl.network.auth import Gate
from hpcrl.network.connection_limits import raise_descriptor_limit
from hpcrl.network.http_server import listen, make_runner
from hpcrl.processes.daemon_threads import run_process
from hpcrl.reporting.log_format import start_logging
from hpcrl.runs.refusals import gate_from_env

_PATH = "/approve"
_HOST = "127.0.0.1"
_LOOK_S = 1.0
_SPEAKS_AS = "OPENAI_API_KEY"
"""Variable from which the router takes its own token for its own requests. It is set in this process only."""


def doorkeeper_app(gate: Gate) -> web.Application:
    """Return an application that answers 200 to clients that may use the router."""

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
    """Replace this process by the router.

    Returns
    -------
    int
        0 after SIGTERM, 2 if it would answer requests without a token, or the token cannot be read.
    """
    from vllm_router import router as vllm_router  # noqa: PLC0415 - of the engines' environment
    from vllm_router.launch_router import launch_router, parse_router_args  # noqa: PLC0415

    start_logging("%(levelname)s %(message)s")
    settings = parse_router_args(sys.argv[1:] if argv is None else argv)
    raise_descriptor_limit()
    # a user's own value is a key for another service
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

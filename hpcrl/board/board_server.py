"""The server of a board: routes, errors in words, and its begin and end."""

from __future__ import annotations

import asyncio
import gzip
import logging
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

import yaml
from aiohttp import web

from hpcrl.board.allocation_page import allocation_page
from hpcrl.board.board_access import BoardAccess
from hpcrl.board.board_state import MOST_COMPARED, Board, BoardAnswer
from hpcrl.board.log_page import log_page
from hpcrl.board.reading_pools import SilentPlaceError
from hpcrl.board.rollout_pages import rollout_page, rollouts_page
from hpcrl.board.run_list import list_page
from hpcrl.board.run_page import compare_page, run_page
from hpcrl.errors import HpcrlError, RunDirError, UsageError
from hpcrl.network.auth import is_loopback
from hpcrl.network.http_server import listen, make_runner, stop_serving
from hpcrl.processes.signals import handle_signals

_log = logging.getLogger(__name__)
_ANSWER_S = 60.0
"""Maximum time of an answer in seconds; a shared filesystem may hang."""
_LEAST_PACKED = 1024
_SHARE = 20
"""A page is asked for again after this many times the seconds that its last answer took."""
_MOST_PAUSE_S = 60.0
_SHUTDOWN_S = 2.0
_Page = Callable[[web.Request, str], BoardAnswer]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def board_app(board: Board, access: BoardAccess) -> web.Application:
    """Return the application: pages, and the files that they load."""
    keys = board.keys
    pages: dict[str, _Page] = {
        "/": lambda request, seen: list_page(board, request.query, seen),
        "/compare": lambda request, seen: compare_page(board, request.query.getall("run", []), seen),
        "/run/{key}": lambda request, seen: run_page(board, _key(request), keys.find(_key(request)), seen),
        "/run/{key}/logs": lambda request, seen: log_page(
            board, _key(request), keys.find(_key(request)), request.query, seen
        ),
        "/run/{key}/nodes": lambda request, seen: allocation_page(board, _key(request), keys.find(_key(request)), seen),
        "/run/{key}/rollouts": lambda request, seen: rollouts_page(
            board, _key(request), keys.find(_key(request)), request.query, seen
        ),
        r"/run/{key}/rollouts/{group:\d{1,12}}/{member:\d{1,12}}": lambda request, seen: rollout_page(
            board, _key(request), keys.find(_key(request)), _rollout(request), seen
        ),
    }
    app = web.Application(middlewares=[access.middleware()])
    app.add_routes([web.get(path, _handler(board, page)) for path, page in pages.items()])
    app.add_routes([web.get("/assets/{name}", _asset_handler(board))])
    return app


def _key(request: web.Request) -> str:
    return request.match_info["key"]


def _rollout(request: web.Request) -> str:
    return f"{int(request.match_info['group'])}/{int(request.match_info['member'])}"


def _handler(board: Board, page: _Page) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        seen, begin_s = request.headers.get("If-None-Match", ""), time.monotonic()
        status, found = 200, BoardAnswer(None, "")
        try:
            async with asyncio.timeout(_ANSWER_S):
                reading = board.pools.submit(_place(board, request), lambda: page(request, seen))
                found = await asyncio.wrap_future(reading)
        except RunDirError as error:
            status, found = 404, _problem(board, "Not found", str(error))
        except UsageError as error:
            status, found = 400, _problem(board, "This cannot be shown", str(error))
        except (TimeoutError, SilentPlaceError):
            status, found = 503, _problem(board, "This cannot be read now", "the filesystem does not answer")
        except (HpcrlError, OSError, ValueError, yaml.YAMLError) as error:
            # files of a run that are half written, damaged, or gone since they were listed
            status, found = 503, _problem(board, "This cannot be read now", f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - one page must not end the others
            _log.exception("the page %s failed", request.path)
            status, found = 500, _problem(board, "This is a defect of hpcrl", f"{type(error).__name__}: {error}")
        pause_s = min(_MOST_PAUSE_S, _SHARE * (time.monotonic() - begin_s))
        headers = {"X-Next-Look-S": f"{pause_s:.1f}", "Vary": "Accept-Encoding"}
        if found.tag:
            headers["ETag"] = found.tag
        if found.html is None:
            return web.Response(status=304, headers=headers)
        body = found.html.encode("utf-8", "backslashreplace")
        if len(body) > _LEAST_PACKED and "gzip" in request.headers.get("Accept-Encoding", ""):
            body = await asyncio.to_thread(gzip.compress, body, 1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        return web.Response(status=status, body=body, content_type="text/html", charset="utf-8", headers=headers)

    return answer


def _place(board: Board, request: web.Request) -> str:
    """Return what a page reads, by which its threads are chosen."""
    if "key" in request.match_info:
        return board.keys.place(_key(request))
    places = {board.keys.place(key) for key in request.query.getall("run", [])}
    return " ".join([request.path, *sorted(places)[:MOST_COMPARED]])


def _problem(board: Board, title: str, text: str) -> BoardAnswer:
    first, *more = text.splitlines() or [title]
    return board.render("problem.html.j2", "", title=title, problem=first, more=more[:20])


def _asset_handler(board: Board) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        asset = board.assets.get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound
        # the name has a digest of the content
        headers = {"Cache-Control": "private, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
        body = asset.content
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body = await asyncio.to_thread(board.packed, asset.name)
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, content_type=asset.kind, charset="utf-8", headers=headers)

    return answer


async def serve_board(
    roots: Sequence[str],
    *,
    host: str,
    port: int,
    remote: bool,
    announce: Callable[[str, int], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Parameters
    ----------
    roots:
        Directories of runs; none: as ``hpcrl ls`` finds them.
    host, port:
        Address; port 0 is any free one.
    remote:
        Allow an address that other machines reach.
    announce:
        Called with the path and query of the first page, and the port, when the board answers.

    Raises
    ------
    UsageError
        The address is not allowed, or cannot be used.
    MissingExtraError
        plotly is not installed.
    """
    if not remote and not is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines, and traffic to a board is not encrypted\n"
            "    hint: leave --host out and forward the port with ssh; or give --allow-remote"
        )
    board = await asyncio.to_thread(Board, roots)
    token = secrets.token_urlsafe(32)
    names = {host, socket.gethostname(), socket.getfqdn()} if remote else {host}
    access = BoardAccess(token, names)
    runner = make_runner(board_app(board, access), shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    stop = asyncio.Event()
    try:
        try:
            port = await listen(runner, access.pending, (host, port))
        except OSError as error:
            raise UsageError(
                f"the board cannot listen on {host}, port {port}: {error.strerror or error}\n"
                "    hint: --port 0, which is the default, takes a free one"
            ) from error
        handle_signals({signal.SIGINT: stop.set, signal.SIGTERM: stop.set})
        announce(f"/?token={token}", port)
        await asyncio.to_thread(board.warm)
        await stop.wait()
    finally:
        await stop_serving(runner)

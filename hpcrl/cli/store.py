"""``hpcrl store status`` and ``canary``: the pool of KV blocks of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import JsonOption
from hpcrl.cli.output import say, table_console
from hpcrl.cli.selection import OptionalRunArgument, RunsRootOption, find

if TYPE_CHECKING:
    from hpcrl.runs.rundir import RunDir
    from hpcrl.store.endpoints import StoreEndpoints

store_app = typer.Typer(help="The KV pool shared by the engines of a run.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    store_app.command("status")(status)
    store_app.command("canary")(canary)
    app.add_typer(store_app, name="store")


def _endpoints(run: RunDir) -> StoreEndpoints:
    from hpcrl.errors import UsageError
    from hpcrl.store.endpoints import StoreEndpoints

    attempts = run.attempts()
    if not attempts:
        raise UsageError(f"{run.name} has not begun yet")
    return StoreEndpoints.read(run, attempts[-1])


def status(run: OptionalRunArgument = None, as_json: JsonOption = False, root: RunsRootOption = None) -> None:
    """Show the pool: its master, the segment of each engine rank, how full they are.

    Exit code: 0 the master answers, 1 it does not.
    """
    import msgspec

    from hpcrl.store.admin import StoreAdmin
    from hpcrl.store.view import STORE_SCHEMA, pool_view

    endpoints = _endpoints(find(run, root))
    pool = StoreAdmin(endpoints.admin).status()
    if as_json:
        document = {"schema": STORE_SCHEMA, "master": endpoints.master, "pool": msgspec.to_builtins(pool)}
        say(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        table_console().print(pool_view(endpoints, pool))


def canary(
    run: OptionalRunArgument = None,
    protocol: Annotated[str, typer.Option(help="Transport: rdma or tcp.")] = "tcp",
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS")] = 30.0,
    as_json: JsonOption = False,
    root: RunsRootOption = None,
) -> None:
    """Put a block into the pool from this machine, read it back, remove it. Engines do the same when they start."""
    import msgspec

    from hpcrl.network.interfaces import address_towards
    from hpcrl.runs.record import RunRecord
    from hpcrl.store.canary import run_canary
    from hpcrl.store.view import CANARY_SCHEMA

    found = find(run, root)
    endpoints = _endpoints(found)
    result = run_canary(
        endpoints,
        host=address_towards(endpoints.host),
        run_id=RunRecord.read(found).run_id,
        protocol=protocol,
        timeout_s=timeout_s,
    )
    if as_json:
        say(msgspec.json.encode({"schema": CANARY_SCHEMA, **msgspec.to_builtins(result)}).decode())
    else:
        say(f"{result.host}: put 1 MiB in {result.put_s * 1e3:.1f} ms, got it in {result.get_s * 1e3:.1f} ms")

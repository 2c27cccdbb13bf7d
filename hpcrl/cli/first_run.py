"""``hpcrl site first-run``: from a profile to a tiny run of all roles, one stage after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli.completion import complete_clusters
from hpcrl.cli.options import JsonOption
from hpcrl.cli.output import say
from hpcrl.cli.site_environments import site_app


def register(app: typer.Typer) -> None:
    """Add the command to ``hpcrl site``."""
    site_app.command("first-run")(first_run)


def first_run(
    cluster: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Cluster profile: a name or a file. A missing one is drafted.",
            autocompletion=complete_clusters,
        ),
    ],
    runs_root: Annotated[
        str | None, typer.Option("--runs-root", metavar="DIR", help="For a draft: a directory that all nodes see.")
    ] = None,
    fabric: Annotated[
        str | None, typer.Option("--fabric", metavar="KIND", help="For a draft: infiniband, roce or ethernet.")
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="For a draft: Python interpreter of roles on nodes.")
    ] = None,
    vllm_python: Annotated[
        str | None,
        typer.Option("--vllm-python", metavar="PATH", help="For a draft: Python interpreter of vLLM engines."),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STAGE",
            help="First stage to run (init, check, check-job, plan, probe or run); later stages follow.",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Run all stages again, including those that have passed.")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes of the check-job stage.")] = 2,
    wait_s: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=1.0, help="Maximum queue time of each job.")
    ] = 1800.0,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory", metavar="DIR", help="Directory of state, recipe and report. Default: first-run-NAME."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a site up: profile, check, check on nodes, plan, probe, and two steps of all roles on two nodes.

    It stops at the first stage that finds something wrong, with what to do; the same command then continues there. What
    has passed with the same profile is not run again. Ctrl-C cancels its job and keeps what has passed. The report is
    written whatever happens.

    Exit code: 0 all stages passed, 1 a stage stopped, 2 the request cannot be fulfilled, 130 interrupted.
    """
    import os
    import shlex

    from hpcrl.bringup.stage import FirstRunRequest
    from hpcrl.bringup.stage_runner import first_run as run_stages

    cwd = Path.cwd()
    place = directory or Path(f"first-run-{Path(cluster).stem}")
    words = ["hpcrl", "site", "first-run", cluster]
    words += ["--directory", str(directory)] if directory is not None else []
    given = {"--runs-root": runs_root, "--fabric": fabric, "--python": python, "--vllm-python": vllm_python}
    # before the profile exists the next call needs the same options for the draft
    draft = [word for name, value in given.items() if value is not None for word in (name, value)]
    request = FirstRunRequest(
        cluster=cluster,
        directory=Path(os.path.abspath(place.expanduser())),
        cwd=cwd,
        environ=os.environ,
        runs_root=runs_root,
        fabric=fabric,
        python=python,
        vllm_python=vllm_python,
        nodes=nodes,
        wait_s=wait_s,
        command=shlex.join(words),
        draft_options=shlex.join(draft),
    )
    result = run_stages(request, say=lambda text: say(text, err=True), begin=begin, again=again)
    if as_json:
        say(result.report.with_suffix(".json").read_text(encoding="utf-8"), nl=False)
    else:
        say(result.report)
    raise typer.Exit(result.end.exit_code)

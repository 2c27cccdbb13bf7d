"""``hpcrl model``: published models on this site: get them, list them, look whether a run can start from one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import ClusterOption, JsonOption
from hpcrl.cli.output import json_text, say, table_console

if TYPE_CHECKING:
    from pathlib import Path

model_app = typer.Typer(help="Published models on this site.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(model_app, name="model")


@model_app.command("get")
def model_get(
    model: Annotated[str, typer.Argument(metavar="OWNER/NAME[@REVISION]", help="Model ID on the Hugging Face hub.")],
    cluster: ClusterOption = "local",
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Target directory; paths.models_root/OWNER/NAME by default."
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            metavar="PATTERN",
            help="Pattern of files to fetch in addition to the default ones. Repeatable.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", metavar="N", min=1, max=64, help="Files at a time.")] = 4,
) -> None:
    """Download a published model, or what is missing of it.

    Files have the digests that the hub lists, or none of them is kept. A download that ended early continues where it
    was. Copies of the weights in other formats, and folders, are left out.
    """
    from pathlib import Path

    from hpcrl.errors import ExitCode, UsageError
    from hpcrl.models.fetch import fetch_model
    from hpcrl.models.hub import parse_hub_id

    found = parse_hub_id(model)
    if found is None:
        raise UsageError(
            f"{model!r} is not a model ID\n    hint: OWNER/NAME or OWNER/NAME@REVISION, as in Qwen/Qwen3-8B"
        )
    target = Path(output).expanduser().absolute() if output is not None else _models_root(cluster) / str(found)
    try:
        fetched = fetch_model(found, target, include=include or (), jobs=jobs, report=lambda line: say(line, err=True))
    except KeyboardInterrupt:
        say("interrupted; received files are kept, and the same command continues from there", err=True)
        raise typer.Exit(ExitCode.CANCELLED) from None
    if fetched.left_out:
        some = ", ".join(fetched.left_out[:5]) + (" and others" if len(fetched.left_out) > 5 else "")
        say(f"left out {len(fetched.left_out)} files (--include): {some}", err=True)
    came = "it was there" if not fetched.received else f"{fetched.received:,} of them received now"
    say(f"{fetched.path}: {found.name} at commit {fetched.commit[:12]}, {fetched.bytes:,} bytes, {came}")


@model_app.command("ls")
def model_ls(cluster: ClusterOption = "local", as_json: JsonOption = False) -> None:
    """List the models in the site's directory of models, and downloads that have not ended."""
    from rich.table import Table

    from hpcrl.models.installed import list_models

    root = _models_root(cluster)
    found = list_models(root)
    if as_json:
        say(json_text({"models_root": str(root), "models": [each.as_json() for each in found]}))
        return
    if not found:
        say(f"{root} holds no models (hpcrl model get OWNER/NAME)", err=True)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("model", "GB", "family", "stored", "commit", "state"):
        table.add_column(name, justify="right" if name == "GB" else "left", no_wrap=name != "state")
    for each in found:
        size = f"{each.bytes / 1e9:,.1f}"
        table.add_row(each.name, size, each.family, each.stored, (each.commit or "")[:12], each.state)
    table_console().print(table)


@model_app.command("check")
def model_check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR|OWNER/NAME", help="A model directory, or the ID of a model that `model get` fetched."
        ),
    ],
    vision: Annotated[
        str | None,
        typer.Option(
            "--vision", metavar="drop|carry", help="For a model with a vision tower: model.vision of the recipe."
        ),
    ] = None,
    cluster: ClusterOption = "local",
    as_json: JsonOption = False,
) -> None:
    """Check whether trainer and engines can start from a model, by the headers of its files, on a login node.

    Compares names, shapes and dtypes of all tensors with those of the family, and looks at configuration, tokenizer
    and chat template.
    """
    from hpcrl.errors import ExitCode, UsageError
    from hpcrl.jobplan.model_summary import summarise_model

    if vision not in (None, "drop", "carry"):
        raise UsageError(f"--vision {vision} is neither drop nor carry")
    summary = summarise_model(_find_model(model, cluster), vision)
    if as_json:
        say(json_text(summary.as_json()))
    else:
        width = max(map(len, summary.facts), default=0)
        for name, value in summary.facts.items():
            say(f"{name:<{width}}  {value}")
        for note in summary.notes:
            say(f"note: {note}")
        for what, hint in summary.problems:
            say(f"problem: {what}" + (f"\n    hint: {hint}" if hint else ""))
        say(f"{summary.path}: " + ("good" if summary.is_good else f"{len(summary.problems)} problems"))
    if not summary.is_good:
        raise typer.Exit(ExitCode.FAILED)


@model_app.command("extract")
def model_extract(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR|OWNER/NAME", help="A model directory, or the ID of a model that `model get` fetched."
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="Target directory of the language model.")
    ],
    cluster: ClusterOption = "local",
) -> None:
    """Write the language model of a model that also sees, in names and configuration of its own family.

    Towers and projectors are left out: exports of a run are language models.
    """
    from pathlib import Path

    from hpcrl.jobplan.language_model import extract_language_model

    extracted = extract_language_model(_find_model(model, cluster), Path(output).expanduser().absolute())
    left = ", ".join(f"{name} ({count})" for name, count in sorted(extracted.left_out.items())) or "none"
    say(f"{extracted.path}: {extracted.tensors:,} tensors; left out: {left}")


@model_app.command("dequantise")
def model_dequantise(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR|OWNER/NAME", help="A model directory, or the ID of a model that `model get` fetched."
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="Target directory of the copy.")],
    cluster: ClusterOption = "local",
) -> None:
    """Write a copy of a model whose weights in FP8 or MXFP4 are in bfloat16.

    For vLLM engines, which keep weights as the start model has them; trainer and embedded engine read both.
    """
    import signal
    import subprocess
    import sys
    from importlib.util import find_spec
    from pathlib import Path

    from hpcrl.errors import ExitCode, MissingExtraError
    from hpcrl.processes.interpreter import module_command

    source, target = _find_model(model, cluster), Path(output).expanduser().absolute()
    if find_spec("torch") is None:
        raise MissingExtraError("trainer", "torch")
    # a process of its own: the command line never imports torch. Ctrl-C reaches both; this one ends the other
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    command = module_command(
        sys.executable, "hpcrl.modeling.checkpoint_io.dequantise", str(source), "--output", str(target)
    )
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, handler)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        say(f"interrupted; {target} was not written", err=True)
        raise typer.Exit(ExitCode.CANCELLED) from None
    raise typer.Exit(code)


def _models_root(cluster: str) -> Path:
    from pathlib import Path

    from hpcrl.config.load import load_cluster
    from hpcrl.config.runs_root import absolute_path

    return absolute_path(load_cluster(cluster).value.paths.models_root, Path.cwd())


def _find_model(model: str, cluster: str) -> Path:
    """Return the directory of a model; a directory of this name below the working directory comes first.

    ``model.path`` of a recipe has the same order.
    """
    from pathlib import Path

    from hpcrl.config.runs_root import absolute_path
    from hpcrl.errors import UsageError
    from hpcrl.models.hub import download_command, parse_hub_id

    path = absolute_path(model, Path.cwd())
    if path.is_dir():
        return path
    found = parse_hub_id(model)
    if found is None:
        raise UsageError(f"{path} is not a directory")
    path = _models_root(cluster) / str(found)
    if not path.is_dir():
        command = download_command(str(found), cluster=None if cluster == "local" else cluster)
        raise UsageError(f"{path} does not exist\n    hint: download it: {command}")
    return path

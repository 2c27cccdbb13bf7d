"""``hpcrl site install`` and ``bundle``: environments of a site."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.output import say
from hpcrl.cli.selection import RunsRootOption
from hpcrl.sites.installation.roles import Accelerator, SiteRole

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcrl.sites.installation.environment import EnvironmentContents
    from hpcrl.sites.installation.interpreters import Interpreter
    from hpcrl.sites.installation.staging import Stage

site_app = typer.Typer(help="Sites: environments of login nodes and of roles.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(site_app, name="site")


RoleOption = Annotated[SiteRole, typer.Option("--role", help="Environment to install.")]
AcceleratorOption = Annotated[
    Accelerator | None,
    typer.Option("--accelerator", help="Accelerator of the torch build. Default: cuda, or that of the bundle."),
]


@site_app.command("install")
def install(
    role: RoleOption,
    prefix: Annotated[
        Path, typer.Option("--prefix", metavar="DIR", help="Directory of the environments, visible on all nodes.")
    ],
    accelerator: AcceleratorOption = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", metavar="FILE", help="Install from this file, without a network.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="PATH", help="Base interpreter. Default: that of this command."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done; do nothing.")] = False,
) -> None:
    """Make the environment of a role as DIR/ROLE, in the exact versions that hpcrl ships, each wheel with its digest.

    The environment is complete and imports what the role needs, or it does not exist. uv installs if it is on PATH,
    otherwise pip. Prints the line of a cluster profile that names its interpreter.

    Exit code: 0 the environment exists, 1 it could not be created, 2 the request cannot be fulfilled.
    """
    import os

    from hpcrl.cli.progress import working
    from hpcrl.errors import UsageError
    from hpcrl.sites.installation.bundle import read_bundle
    from hpcrl.sites.installation.environment import install as make
    from hpcrl.sites.installation.installers import find_installer
    from hpcrl.sites.installation.interpreters import ask_interpreter, own_interpreter
    from hpcrl.sites.installation.roles import profile_line

    prefix = Path(os.path.abspath(prefix.expanduser()))
    interpreter = ask_interpreter(python or own_interpreter())
    manifest = None if bundle is None else read_bundle(bundle)
    if manifest is not None:
        here, there = (interpreter.version, interpreter.machine), (manifest.python, manifest.machine)
        if here != there:
            raise UsageError(
                f"{bundle} is for Python {' on '.join(there)}, and {interpreter.path} is Python {' on '.join(here)}\n"
                "    hint: name another interpreter with --python, or make a bundle with --python-version and --machine"
            )
        if accelerator not in (None, manifest.accelerator):
            raise UsageError(f"{bundle} is for {manifest.accelerator}\n    hint: leave out --accelerator")
        accelerator = Accelerator(manifest.accelerator)
    installer = find_installer()
    accelerator = accelerator or Accelerator.CUDA
    contents = _contents(role, accelerator, interpreter, bundle)
    target = prefix / role
    line = profile_line(role, str(target / "bin" / "python"))
    if dry_run:
        _say_plan(role, accelerator, interpreter, target, installer.name, bundle)
        say(line)
        return
    with working(f"installing {target}"):
        made = make(prefix, str(role), interpreter, installer, contents, say=lambda text: say(text, err=True))
    say(f"{target} {'is ready' if made.was_made else 'is there already, of the same versions'}", err=True)
    say(f"its base is {interpreter.path}: nodes need the same path", err=True)
    say(line)


def _contents(
    role: SiteRole, accelerator: Accelerator, interpreter: Interpreter, bundle: Path | None
) -> Callable[[Stage], EnvironmentContents]:
    """Return what gives the contents of an environment once there is a place for its files."""
    from hpcrl.sites.installation.bundle import read_bundle, unpack_role
    from hpcrl.sites.installation.environment import EnvironmentContents
    from hpcrl.sites.installation.locks import read_lock
    from hpcrl.sites.installation.own_wheel import own_wheel
    from hpcrl.sites.installation.roles import imports_of, lock_name

    if bundle is not None:
        return lambda stage: unpack_role(bundle, read_bundle(bundle), role, stage)
    lock = read_lock(lock_name(role, accelerator))
    packages = lock.packages_for(interpreter.version, interpreter.machine)
    return lambda stage: EnvironmentContents(
        lock.name, packages, own_wheel(stage.wheels), imports_of(role), lock.wheel_bytes
    )


def _say_plan(
    role: SiteRole,
    accelerator: Accelerator,
    interpreter: Interpreter,
    target: Path,
    installer: str,
    bundle: Path | None,
) -> None:
    """Say what an installation would do."""
    from hpcrl.sites.installation.locks import read_lock
    from hpcrl.sites.installation.roles import imports_of, lock_name

    lock = read_lock(lock_name(role, accelerator))
    packages = lock.packages_for(interpreter.version, interpreter.machine)
    state = "is there already: it would be compared" if target.exists() else "would be made"
    say(f"{target} {state}", err=True)
    say(f"interpreter: {interpreter.path}, Python {interpreter.version} on {interpreter.machine}", err=True)
    source = f"from {bundle}, without a network" if bundle else "from the package index"
    # a bundle has the list of the hpcrl that made it
    how_many = f"all packages of {lock.name}" if bundle else f"{len(packages)} packages of {lock.name}"
    say(f"{how_many}, by {installer}, {source}", err=True)
    say(f"wheels of {lock.wheel_bytes / (1 << 30):,.2f} GiB at most; imports {', '.join(imports_of(role))}", err=True)


@site_app.command("bundle")
def bundle(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")],
    roles: Annotated[
        list[SiteRole] | None, typer.Option("--role", help="Name of an environment; repeatable. Default: all.")
    ] = None,
    accelerator: AcceleratorOption = None,
    python_version: Annotated[
        str | None,
        typer.Option(
            "--python-version", metavar="X.Y", help="Python version of the site. Default: that of this command."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine", metavar="NAME", help="Machine type of the site (`uname -m`). Default: that of this machine."
        ),
    ] = None,
) -> None:
    """Collect all wheels of environments and of hpcrl into one file, for a site without a network.

    Prints the file's digest, as `sha256sum` does. A call that was interrupted keeps what it has collected for the next.
    """
    import os
    import platform
    import sys

    from hpcrl.cli.progress import working
    from hpcrl.sites.installation.bundle import write_bundle
    from hpcrl.sites.installation.locks import read_lock
    from hpcrl.sites.installation.roles import lock_name

    accelerator = accelerator or Accelerator.CUDA
    output = Path(os.path.abspath(output.expanduser()))
    locks = {role: read_lock(lock_name(role, accelerator)) for role in roles or SiteRole}
    with working(f"writing {output}"):
        digest = write_bundle(
            output,
            locks,
            accelerator,
            python_version or f"{sys.version_info[0]}.{sys.version_info[1]}",
            machine or platform.machine(),
            say=lambda text: say(text, err=True),
        )
    say(f"{digest}  {output}")


@site_app.command("metrics-targets")
def metrics_targets(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Directory of the files that Prometheus reads.")
    ],
    root: RunsRootOption = None,
) -> None:
    """Write what Prometheus needs to scrape your runs: a target for each, and the configuration of its job.

    Call it again when runs have begun or ended, for example by cron: files are replaced as a whole.
    """
    from hpcrl.cli.selection import ask_slurm, runs_in_sight
    from hpcrl.runs.monitoring.targets import ALERTS, DASHBOARD, write_targets

    ask_slurm()
    living = write_targets(runs_in_sight(root), output)
    for target in living:
        say(f"{target.run.name}: {target.address}")
    say(f"scrape_config_files: [{output.resolve()}/scrape.yml]", err=True)
    say(f"rule_files: [{ALERTS}]", err=True)
    say(f"dashboard for Grafana: {DASHBOARD}", err=True)

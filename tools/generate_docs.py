"""Write the parts of docs/ that are made from code: ``python tools/generate_docs.py``."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hpcrl.config.base import MOST
from hpcrl.config.cluster import CLUSTER_KINDS
from hpcrl.config.meanings import meanings_of
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Rule, SiteRule
from hpcrl.config.rules.table import RULES, SITE_RULES

ROOT = Path(__file__).resolve().parent.parent

CONFIGURATION_HEAD = """\
# Configuration reference

Generated from the code by `make docs`; a test fails if it is out of date.

A **recipe** says what to train, a **cluster profile** where. Both are YAML. Unknown keys are errors, units stand in
the names, and every value can be traced: `hpcrl recipe show RECIPE` prints where each one comes from.

- `extends: NAME_OR_PATH` starts a recipe from another one; mappings are merged, everything else is replaced. `null` in
  place of a mapping takes it out: it is then what it is by default.
- `--set key.path=value` changes one value from the command line; list items by number (`environments.0.weight=2`).
- A cluster profile may extend another one, too. A file of your own in `~/.config/hpcrl/clusters`, called like that of
  the site and with `extends:` and its name, is on top of it ([admins.md](admins.md)).
- Cluster profiles are looked up by name in `~/.config/hpcrl/clusters`, `/etc/hpcrl/clusters`, those that come with
  hpcrl, then `clusters/` of the current directory; the first hit wins. A path works as well.
- Relative paths start at the directory where `hpcrl` is called. `HPCRL_RUNS_ROOT` overrides `paths.runs_root`.
- [admins.md](admins.md) tells how to write a profile; and where sbatch templates are found.
- `hpcrl recipe schema` prints a JSON schema for editors.
- `schema: 1` at the top of a file is the number of its form, and may be left out. `hpcrl recipe migrate FILE` and
  `hpcrl cluster migrate FILE` show how a file of an earlier version becomes one of the current form; with `--write`
  they change it. Comments and order stay. Runs of earlier versions are read without that.
"""


def configuration() -> str:
    """docs/configuration.md."""
    parts = [CONFIGURATION_HEAD, "## Recipe\n", *_section(Recipe, "")]
    for kind, model in CLUSTER_KINDS.items():
        meaning = " ".join((model.__doc__ or "").split())
        parts += [f"## Cluster profile with `kind: {kind}`\n", f"{meaning}\n", *_section(model, "")]
    parts += [
        "## Rules within a cluster profile\n",
        "Checked before anything is started, and by `hpcrl cluster check`.\n",
    ]
    parts += _rules(SITE_RULES)
    parts += ["## Rules across components\n", "Checked before anything is started.\n"]
    parts += _rules(RULES)
    return "\n".join(parts) + "\n"


def _rules(rules: Iterable[Rule | SiteRule]) -> list[str]:
    rows = [f"| `{rule.name}` | {rule.conflict} | {rule.hint} |" for rule in rules]
    return ["| rule | what must hold | hint |\n| --- | --- | --- |", *rows, ""]


def cli() -> str:
    """docs/cli.md."""
    command = [sys.executable, "-m", "typer", "hpcrl.cli.main", "utils", "docs", "--name", "hpcrl"]
    body = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    exit_codes = (
        "## Exit codes\n\n| code | meaning |\n| --- | --- |\n| 0 | done |\n| 1 | the run failed |\n"
        "| 2 | the request cannot be fulfilled; nothing was changed |\n"
        "| 3 | a plan does not fit: memory or nodes are short; the message names the place and settings that help |\n"
        "| 4 | it is unknown whether a plan fits: the model's sizes are not known, or the profile lacks a number; "
        "the message lists the skipped checks |\n"
        "| 93 | the run is given up: attempts without progress; do not requeue |\n"
        "| 94 | no checkpoint of the run can be restored, and it does not restart at step 0 by itself: "
        "`hpcrl resume --from-scratch` or `--from-step` (docs/checkpoints.md) |\n| 130 | cancelled |\n"
    )
    head = "# Command reference\n\nGenerated from the code by `make docs`; a test fails if it is out of date.\n\n"
    # one level down: the page has a title of its own
    body = "\n".join(f"#{line}" if line.startswith("#") else line.rstrip() for line in body.strip().splitlines())
    return f"{head}{exit_codes}\n{body}\n"


GENERATED = {"docs/configuration.md": configuration, "docs/cli.md": cli}


def _section(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """A table of a model's own fields, then a section for each model below it."""
    rows, below = [], []
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        children = list(_models(field.annotation))
        suffix = {tuple: "[].", dict: ".NAME."}.get(get_origin(_plain(field.annotation)), ".")
        if children:
            below += [(child, f"{key}{suffix}") for child in children]
        rows.append(
            f"| `{key}` | {_type(field.annotation, field)} | {_default(field, bool(children))} | {_text(model, name)} |"
        )
    yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
    yield from rows
    yield ""
    for child, child_prefix in below:
        yield f"### `{child_prefix.rstrip('.')}`{_kind(child)}\n"
        yield " ".join((child.__doc__ or "").replace("``", "`").split()) + "\n"
        yield from _section(child, child_prefix)


def _text(model: type[BaseModel], name: str) -> str:
    return " ".join(meanings_of(model).get(name, "").replace("``", "`").split()).replace("|", "\\|")


def _kind(model: type[BaseModel]) -> str:
    field = model.model_fields.get("kind")
    values = get_args(field.annotation) if field is not None else ()
    return f" with `kind: {values[0]}`" if len(values) == 1 else ""


def _plain(annotation: Any) -> Any:
    """A type without what is annotated to it and without ``| None``, which the default tells."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
            continue
        members = [member for member in get_args(annotation) if member is not type(None)]
        if get_origin(annotation) not in (Union, types.UnionType) or len(members) > 1:
            return annotation
        annotation = members[0]


def _limits(annotation: Any) -> Iterator[Any]:
    """What is annotated to a type that may be ``| None``."""
    for member in get_args(annotation):
        if get_origin(member) is Annotated:
            for note in get_args(member)[1:]:
                yield from note.metadata if isinstance(note, FieldInfo) else (note,)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    annotation = _plain(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, tuple, dict):
        for argument in get_args(annotation):
            yield from _models(argument)


def _type(annotation: Any, field: FieldInfo) -> str:
    limits = [*field.metadata, *_limits(annotation)]
    annotation = _plain(annotation)
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{value}`" for value in get_args(annotation))
    if list(_models(annotation)):
        return {tuple: "list", dict: "sections by name"}.get(get_origin(annotation), "section")
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return " or ".join(_type(member, FieldInfo()) for member in members)
    names = {int: "integer", float: "number", str: "text", bool: "true/false", dict: "mapping", tuple: "list"}
    name = names.get(get_origin(annotation) or annotation, str(annotation))
    bounds = []
    for limit in limits:
        for kind, sign in ((Ge, "≥"), (Gt, ">"), (Le, "≤"), (Lt, "<")):
            # every number has the bound of exact ones, which nobody meets
            if isinstance(limit, kind) and limit != Le(MOST):
                bounds.append(f"{sign} {getattr(limit, kind.__name__.lower()):g}")
        if isinstance(limit, MinLen) and limit.min_length:
            bounds.append(f"≥ {limit.min_length} items")
    return f"{name} {', '.join(bounds)}".strip()


def _default(field: FieldInfo, is_section: bool) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if is_section:
        return "none" if field.default is None else ""
    if field.default is None:
        return "none"
    return f"`{field.default!r}`" if field.default != "" else ""


if __name__ == "__main__":
    for name, make in GENERATED.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
        print(name)

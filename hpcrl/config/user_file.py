"""The user's own notifiers, for all of their runs: ``notify.yaml`` in ``~/.config/hpcrl``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from hpcrl.config.base import StrictModel
from hpcrl.config.load import Loaded, load_file
from hpcrl.config.outlets import NotifierConfig
from hpcrl.config.plan import Plan
from hpcrl.config.resources import user_dir


class UserNotifiers(StrictModel):
    """The file."""

    notify: Annotated[tuple[NotifierConfig, ...], Field(strict=False)] = ()
    """Notifiers of all runs of this user. Those of recipe and profile with the same name take their place."""


def user_file() -> Path:
    """Return the path of the file, which may not exist."""
    return user_dir() / "notify.yaml"


def load_user_notifiers() -> Loaded[UserNotifiers]:
    """Load the file; without one there are no notifiers.

    Raises
    ------
    ConfigError
        With every finding, as for recipes.
    """
    path = user_file()
    return load_file(UserNotifiers, path) if path.is_file() else Loaded(UserNotifiers(), path, {})


def with_user_notifiers(plan: Plan) -> Plan:
    """Return a plan with the user's notifiers behind its own (ConfigError as of `load_user_notifiers`)."""
    known = {each.name for each in plan.notify}
    own = tuple(each for each in load_user_notifiers().value.notify if each.name not in known)
    return plan.model_copy(update={"notify": (*plan.notify, *own)}) if own else plan

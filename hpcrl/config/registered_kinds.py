"""Kinds of environments that other packages register (`hpcrl.extend`)."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from hpcrl.config.explain import plain_message
from hpcrl.config.hosted_environment import HostedEnv
from hpcrl.extend import ExtensionError, call_extension, extension_path, import_object, installed_extensions


def read_registered_kind(given: Any, *, kinds: Sequence[str]) -> Any:
    """Turn an environment of a kind that another package registers into a ``custom`` one.

    The package's model checks its settings, and says what makes the environment. From there on the recipe has that, so
    that the orchestrator alone needs the package: the trainer and engines read the recipe, too.

    Raises
    ------
    PydanticCustomError
        The package's model cannot be imported, or is not an environment kind.
    ValidationError
        It refuses settings.
    """
    kind = given.get("kind") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind in kinds or not (known := installed_extensions("environment")):
        return given
    if kind not in known:
        every = [*kinds, *(name for name in known if name not in kinds)]
        close = get_close_matches(kind, every, n=1)
        what = f"kind must be one of {', '.join(every)}, is {kind!r}"
        hint = f"did you mean {close[0]!r}?" if close else ""
        raise PydanticCustomError("extension", "{what}", {"what": what, "hint": hint})
    try:
        path = extension_path("environment", kind)
        model = import_object(path)
        if not (isinstance(model, type) and issubclass(model, HostedEnv)):
            raise ExtensionError(
                f"{path} is not an environment kind", "derive it from hpcrl.config.environments.HostedEnv"
            )
        read = _read_registered(model, given)
        factory, arguments = call_extension(f"{path}.call", read.call, "return package.module:Name and arguments")
        shared = {name: getattr(read, name) for name in HostedEnv.model_fields}
    except ExtensionError as error:
        raise PydanticCustomError("extension", "{what}", {"what": error.what, "hint": error.hint}) from error
    return {**shared, "kind": "custom", "factory": factory, "args": arguments, "env": read.variables()}


def _read_registered(model: type[HostedEnv], given: dict[str, Any]) -> HostedEnv:
    """Read an environment by the model of another package; its errors say which keys that has."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        lines = []
        for each in error.errors(include_url=False, include_context=False):
            unknown, field = each["type"] == "extra_forbidden", model.model_fields.get(str(each["loc"][-1]))
            what = "unknown key" if unknown else plain_message(each)
            hint = f"keys here: {', '.join(model.model_fields)}" if unknown else (field and field.description) or ""
            reason = PydanticCustomError("extension", "{what}", {"what": what, "hint": hint})
            lines.append(InitErrorDetails(type=reason, loc=each["loc"], input=each["input"]))
        raise ValidationError.from_exception_data(model.__name__, lines) from error

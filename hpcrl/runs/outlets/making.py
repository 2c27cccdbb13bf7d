"""Make sinks and notifiers of other packages, and check that they are such."""

from __future__ import annotations

from typing import Any, cast

from hpcrl.config.outlets import NotifierConfig, SinkConfig
from hpcrl.extend import ExtensionError, call_extension, extension_path, import_object
from hpcrl.runs.outlets.interface import MetricSink, Notifier

SHIPPED: dict[str, str] = {
    "mlflow": "hpcrl.runs.outlets.shipped.mlflow_sink:MlflowSink",
    "tensorboard": "hpcrl.runs.outlets.shipped.tensorboard_sink:TensorBoardSink",
    "trackio": "hpcrl.runs.outlets.shipped.trackio_sink:TrackioSink",
    "wandb": "hpcrl.runs.outlets.shipped.wandb_sink:WandbSink",
}
"""Sinks that hpcrl brings, by name."""
SHIPPED_NOTIFIERS: dict[str, str] = {
    "apprise": "hpcrl.runs.outlets.shipped.apprise_notifier:AppriseNotifier",
    "command": "hpcrl.runs.outlets.shipped.command_notifier:Program",
    "mail": "hpcrl.runs.outlets.shipped.mail:Mail",
    "webhook": "hpcrl.runs.outlets.shipped.webhook:Webhook",
}
"""Notifiers that hpcrl brings, by name."""


def make_sink(config: SinkConfig) -> MetricSink:
    """Import and make a sink.

    Raises
    ------
    ExtensionError
        It cannot be imported or made, or lacks a method.
    """
    path = SHIPPED.get(config.sink) or extension_path("sink", config.sink)
    return cast("MetricSink", _made(path, config.parameters, ("open", "log", "close"), "MetricSink"))


def make_notifier(config: NotifierConfig) -> Notifier:
    """Import and make a notifier.

    Raises
    ------
    ExtensionError
        It cannot be imported or made, or lacks its method.
    """
    path = SHIPPED_NOTIFIERS.get(config.notifier) or extension_path("notifier", config.notifier)
    return cast("Notifier", _made(path, config.parameters, ("notify",), "Notifier"))


def _made(path: str, parameters: dict[str, Any], methods: tuple[str, ...], called: str) -> Any:
    factory = import_object(path, called="callable")
    made = call_extension(path, lambda: factory(**parameters), "correct its parameters")
    if missing := [name for name in methods if not callable(getattr(made, name, None))]:
        hint = f"see hpcrl.runs.outlets.interface.{called}"
        raise ExtensionError(f"{path} gave a {type(made).__name__}, which has no {', '.join(missing)}", hint)
    return made

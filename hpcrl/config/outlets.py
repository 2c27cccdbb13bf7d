"""Programs of other packages that hear of a run: sinks of its metrics, notifiers of its events (docs/extending.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hpcrl.config.base import ExtensionName, Name, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel


class SinkConfig(StrictModel):
    """A sink of metrics. It runs in a process of its own on the node of the supervisor."""

    name: Name
    """Name of the sink in this run, for its log and its position; unique."""
    sink: ExtensionName
    """``tensorboard``, ``wandb``, ``mlflow`` or ``trackio`` (docs/observing.md); or ``package.module:Name`` of what
    makes a `hpcrl.runs.outlets.interface.MetricSink`, or the name under which an installed package registers one."""
    parameters: dict[str, Any] = {}
    """Keyword arguments for it."""
    python: str | None = None
    """Absolute path of the interpreter that runs it: one with the sink's library and hpcrl. None: that of the
    supervisor."""
    close_timeout_s: PositiveFloat = 30.0
    """Maximum time in seconds at the end of an attempt for the steps that it has not been given yet, and for its
    ``close()``; then it is killed."""
    rollouts_every_steps: NonNegativeInt = 20
    """Number of steps from one table of rollouts to the next: texts of the worst, the median and the best of each
    environment. 0: no text of a rollout is sent."""
    try_before_submit: bool = True
    """``hpcrl recipe check`` and ``submit`` make it, too. Set ``false`` if it can only be created on a node."""


NoticeEvent = Literal["completed", "failed", "cancelled", "requeued", "stalled", "best", "disk", "drops"]
"""Events of a run that people can be notified of."""


class NotifierConfig(StrictModel):
    """A notifier of events of a run. It runs in processes of its own on the node of the supervisor."""

    name: Name
    """Name of the notifier in this run, for its log; unique."""
    notifier: ExtensionName
    """``webhook``, ``command``, ``mail`` or ``apprise`` (docs/notifications.md); or ``package.module:Name`` of what
    makes a `hpcrl.runs.outlets.interface.Notifier`, or the name under which an installed package registers one."""
    parameters: dict[str, Any] = {}
    """Keyword arguments for it. Secrets come from a file or a variable: ``url_file``, ``password_env``."""
    python: str | None = None
    """Absolute path of the interpreter that sends messages: one with the notifier's library and hpcrl. None: that of
    the supervisor."""
    events: Annotated[tuple[NoticeEvent, ...], Field(min_length=1, strict=False)] = (
        "completed",
        "failed",
        "stalled",
        "disk",
    )
    """Events of which it sends messages: the ends ``completed``, ``failed`` and ``cancelled``; ``requeued`` (another
    attempt follows, or has begun after one that was lost); ``stalled`` (a role makes no progress); ``best`` (a held-out
    reward above all before); ``disk`` (space is nearly gone); ``drops`` (too many rollouts are dropped)."""
    drops_above: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    """Share of dropped rollouts, over ten steps, above which ``drops`` is sent. Groups that are dropped because all of
    their rewards are equal do not count."""
    max_per_hour: PositiveInt = 20
    """Maximum messages in an hour. Ends of a run are sent in any case."""
    tries: PositiveInt = 4
    """Maximum tries for one message, with growing pauses."""
    timeout_s: PositiveFloat = 30.0
    """Maximum time in seconds for one try, and at the end of an attempt for all of them; then it is killed."""
    try_before_submit: bool = True
    """``hpcrl recipe check`` and ``submit`` make it, too; no message is sent. Set ``false`` if it can only be created
    on a node."""

"""Check by labels that an engine still has the weights that it was given; a new process has others."""

from __future__ import annotations

import time

from hpcrl.rollouts.engines.engine import Engine


async def changed_weights(engine: Engine, *, timeout_s: float) -> str:
    """Ask an engine for the label of its weights, and note where that proves them (`Engine.proved`).

    Returns
    -------
    str
        Why these are not the weights that it was given; empty where they are, where it does not say, and where nothing
        can be asked: it is away, serves no version, or its weights are being changed.
    """
    version, incarnation = engine.version, engine.incarnation
    if engine.away or version < 0 or not engine.open_for_new:
        return ""
    asked_s = time.monotonic()
    labels = await engine.client.weight_labels(timeout_s=timeout_s)
    # an update that began meanwhile changes the label before it is ours
    if (version, incarnation) != (engine.version, engine.incarnation) or not engine.open_for_new:
        return ""
    others = [label for label in labels if label not in (None, str(version))]
    if others:
        return f"it was restarted: it has weights {others[0]!r}, not {version}"
    if None not in labels:
        engine.proved(asked_s)
    return ""

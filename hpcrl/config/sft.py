"""The section ``sft`` of a recipe: supervised training on conversations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpcrl.config.base import NonNegativeInt, PositiveFloat, PositiveInt, StrictModel


class SftColumns(StrictModel):
    """Names of columns of the data."""

    messages: str = "messages"
    """The conversation: a list of messages with ``role`` and ``content``, and where they have them ``tool_calls``,
    ``tool_call_id``, ``name`` and ``reasoning_content``. One of the assistant with ``weight: 0`` is context alone.
    Messages with ``from`` and ``value`` are read, too. Not read where there is a ``prompt``."""
    prompt: str | None = None
    """In place of ``messages``: text of the user, or messages, that a completion follows."""
    completion: str = "completion"
    """With ``prompt``: text of the assistant, or messages."""
    tools: str | None = None
    """Tools that the conversation has, as the chat template wants them: a list of JSON schemas."""


class SftConfig(StrictModel):
    """Supervised training on conversations, in place of rollouts: ``hpcrl sft``. The run has a trainer alone."""

    data: str | None = None
    """File (``.jsonl``, ``.csv`` or ``.tsv``, also packed as ``.gz``; ``.parquet``) or directory (read by the library
    ``datasets``); relative to the current directory. Give this or ``hub``."""
    hub: str | None = None
    """``ORG/NAME`` of a data set on Hugging Face, read by ``datasets``, from its cache where it is offline."""
    subset: str | None = None
    """Configuration to read from a directory or from a data set of the hub."""
    revision: str | None = None
    """Commit or tag of the data set of the hub."""
    columns: SftColumns = SftColumns()
    """Names of columns."""
    system: str | None = None
    """Text of a system message in front of conversations that have none."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the conversations that are held out, chosen by a hash of the messages before the first reply. Without
    this, ``held_out_data`` and ``split_column`` no conversation is held out."""
    held_out_data: str | None = None
    """Separate file or directory of held-out conversations, with the same columns."""
    split_column: str | None = None
    """Column that says whether a row is for training or held out. Rows that ``datasets`` reads have a column ``split``
    with the name of their split."""
    train_values: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("train",)
    """Values of ``split_column`` for training. Rows with any other value are left out, and counted."""
    held_out_values: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("test",)
    """Values of ``split_column`` that are held out."""
    evaluate_every_steps: NonNegativeInt = 10
    """Steps between computations of the loss on held-out conversations; it is computed after the last step as well. 0:
    only then."""
    conversations_per_step: PositiveInt = 32
    """Maximum conversations of a step. Those of an epoch are shared out evenly over its steps."""
    epochs: PositiveInt | None = None
    """Passes over the training conversations after which the run ends, where ``trainer.steps`` does not end it before.
    None: ``trainer.steps`` alone."""
    shuffle: bool = True
    """Each epoch has an order of its own, made from ``seed``. ``false``: the order of the data."""
    max_len: PositiveInt = 2048
    """Maximum tokens of a sequence; ``trainer.micro_batch_tokens`` holds one."""
    over_long: Literal["drop", "truncate"] = "drop"
    """Treatment of a conversation that is longer: ``drop`` leaves it out; ``truncate`` cuts its end off, and leaves
    it out where nothing to train is left. Both are counted."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens that have a loss. ``assistant``: all turns of the assistant, the end marker of a turn included; ``last``:
    the last one of these; ``all``: every token but the first."""
    thinking: Literal["keep", "drop"] = "keep"
    """Whether ``reasoning_content`` of the assistant is given to the chat template, which decides where it stands.
    ``drop`` also cuts a leading ``<think>...</think>`` from the content."""
    check_before_submit: bool = True
    """``hpcrl sft`` reads the data, and renders some of it. ``false`` where only nodes see it."""
    check_timeout_s: PositiveFloat = 600.0
    """Longest time for that, in seconds."""

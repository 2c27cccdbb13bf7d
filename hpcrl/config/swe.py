"""Settings of software-engineering tasks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hpcrl.config.base import Fraction, PositiveFloat, PositiveInt
from hpcrl.config.hosted_environment import HostedEnv


class SweEnv(HostedEnv):
    """Software-engineering tasks: a repository in a sandbox with a shell and an editor, judged by tests in another
    sandbox. It runs in a process of its own."""

    kind: Literal["swe"]
    tasks: str
    """File of tasks (``tasks.jsonl`` of `hpcrl swe make`), file of rows (``.jsonl`` or ``.parquet``), directory with
    the files of one table of rows, or directory of Harbor tasks; relative to the current directory."""
    format: Literal["hpcrl", "swe-bench", "swe-gym", "swe-smith", "r2e-gym", "harbor"] = "hpcrl"
    """Format of the file: tasks of hpcrl, or rows of these data sets."""
    trees: str | None = None
    """Directory with the repositories of rows: a directory or tar file named as the row's ``instance_id``, or
    ``OWNER__NAME@COMMIT``."""
    images: str | None = None
    """Directory with the images of rows: an unpacked root filesystem (for Apptainer also a SIF or squashfs file) for
    each one, named as the image with ``__`` in the place of each ``/``, ``:`` and ``@``."""
    sandbox_backend: Literal["bubblewrap", "apptainer", "docker", "podman"] = "bubblewrap"
    """Program that makes sandboxes. Docker and Podman use the image of a row by its name, which must be on the node
    already; all but bubblewrap need an image for each task."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the tasks that are held out, chosen by a hash of their ids, where tasks do not say it themselves."""
    min_difficulty: Fraction = 0.0
    """Easier tasks are left out; tasks of unknown difficulty stay."""
    max_difficulty: Fraction = 1.0
    """More difficult tasks are left out."""
    hidden_tests: bool = False
    """Take the files of the tests away from the repository that the policy sees."""
    rename_tests: bool = True
    """Run tests under random names, so that code under test cannot tell them from the judge's canaries. ``false`` for
    tests that depend on their names, where ``hpcrl env check`` shows that the right answer earns less than 1."""
    system: str | None = None
    """Text of the system message, in place of a short one about the sandbox."""
    max_turns: PositiveInt = 100
    """Maximum model turns; then the rollout ends and is judged."""
    command_timeout_s: PositiveFloat = 120.0
    """Timeout of one command in seconds; it is then killed, and the tool result reports it."""
    rollout_timeout_s: PositiveFloat = 3600.0
    """Maximum time of all turns in seconds; then the rollout ends and is judged."""
    max_output_characters: PositiveInt = 10_000
    """Maximum length of a tool result; the middle of a longer one is left out, with a notice."""
    summary_points: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = ()
    """Sizes of the context in tokens, ascending: the n-th summary is asked for where the next results would make the
    context larger than the n-th size; the last one holds for all further summaries. The work then continues from the
    task and the summary, as a branch of the rollout. With any, a summary is asked for at the limit of the context, too.
    Empty: no summaries."""
    summary_room_tokens: PositiveInt = 4096
    """Tokens below the limit of the context that are kept for a summary. A turn may be longer than that: with
    ``rollouts.sampling.max_new_tokens`` here, no turn is cut by the context."""
    max_summaries: PositiveInt = 6
    """Maximum summaries of a rollout. After the last one the context grows up to its limit."""
    max_sandboxes: PositiveInt = 64
    """Maximum rollouts that work at once; the others wait."""
    memory_gib: PositiveFloat = 2.0
    """Maximum memory of a sandbox, its files included; nothing is reserved. ``hpcrl plan`` shows the sum of all."""
    disk_gib: PositiveFloat = 1.0
    """Size of the files of a sandbox."""
    processes: PositiveInt = 256
    """Processes and threads of a sandbox."""

    def call(self) -> tuple[str, dict[str, Any]]:
        return "hpcrl.rollouts.environments.swe:make", {"config": self.model_dump(mode="json")}

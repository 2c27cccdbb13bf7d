"""Environments with ``load_environment``, of verifiers older than 0.4: data sets, rubrics and turns in this process.

The library's client gets the address and the key of the rollout's endpoint at hpcrl's gateway, as OpenAI's API.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any

_packages: Any = sys.modules["hpcrl_verifiers_packages"]
WrongSettingError, RolloutFailedError = _packages.WrongSettingError, _packages.RolloutFailedError
_V1_SETTINGS = ("settings", "agent", "held_out_args", "host_commands")
_raised: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("raised", default=None)


def make(build: dict[str, Any], module: ModuleType, splits: ModuleType) -> ClassicBackend:
    """Make the environment that ``load_environment`` of a module returns.

    Raises
    ------
    WrongSettingError
        Its arguments or its data are wrong.
    """
    for key in _V1_SETTINGS:
        if build[key]:
            raise WrongSettingError(key, "this is a setting of tasksets: the package has load_environment", "remove it")
    try:
        types: Any = importlib.import_module("verifiers.types")
    except ImportError:
        what = "the package has load_environment, which verifiers 0.4 does not have any more"
        raise WrongSettingError("python", what, "install 'verifiers<0.4' for it") from None
    try:
        env = module.load_environment(**build["args"])
        rows = list(env.get_dataset())
        held_out = None if getattr(env, "eval_dataset", None) is None else list(env.get_eval_dataset())
    except (Exception, SystemExit) as error:
        what = f"load_environment(**args) or its data: {type(error).__name__}: {error}"
        raise WrongSettingError("args", what, "check args") from error
    tasks = splits.TaskSplits(
        rows[: build["max_tasks"]],
        # the number of a row does not change what it asks
        lambda row: {name: value for name, value in row.items() if name not in ("id", "example_id")},
        share=build["held_out_share"],
        held_out=held_out,
        finite=True,
    )
    notes = []
    if tasks.left_out:
        notes.append(f"{tasks.left_out} training tasks are left out: held-out tasks ask the same")
    _watch_rubric(env.rubric)
    return ClassicBackend(env, tasks, types.ClientConfig, truncated_reward=build["truncated_reward"], notes=notes)


def _watch_rubric(rubric: Any) -> None:
    """Remember what reward functions raise: the library scores 0 then, and hides the error."""
    for inner in getattr(rubric, "rubrics", ()):
        _watch_rubric(inner)
    if isinstance(funcs := getattr(rubric, "funcs", None), list):
        rubric.funcs[:] = [_watched(each) for each in funcs]


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def watched(*args: Any, **keywords: Any) -> Any:
        try:
            found = function(*args, **keywords)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:
            if (raised := _raised.get()) is not None:
                raised.append(f"{getattr(function, '__name__', function)}: {type(error).__name__}: {error}")
            raise

    return watched


class ClassicBackend:
    """Tasks and rollouts of one environment.

    Attributes
    ----------
    notes:
        What is odd about it, a sentence each.
    """

    def __init__(
        self, env: Any, tasks: Any, client_config: Any, *, truncated_reward: float | None, notes: list[str]
    ) -> None:
        self._env, self._tasks, self._client_config = env, tasks, client_config
        self._truncated_reward = truncated_reward
        self.notes = notes

    def task(self, split: str, index: int) -> dict[str, Any]:
        """Return the messages of a task."""
        prompt = self._tasks.task(split, index)["prompt"]
        if isinstance(prompt, str):
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"messages": [{"role": str(each["role"]), "content": str(each["content"])} for each in prompt]}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold nothing: such environments start what they need themselves."""
        yield

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Play one rollout; returns its reward and named parts.

        Raises
        ------
        RolloutFailedError
            It has failed, or a function of its rubric raised.
        """
        row = self._tasks.task(asked["split"], asked["index"])
        variable = f"HPCRL_ROLLOUT_API_KEY_{asked['id']}"
        os.environ[variable] = asked["key"]
        raised: list[str] = []
        _raised.set(raised)
        try:
            # a failed request is not repeated: the gateway does that for engines
            client = self._client_config(api_base_url=asked["url"], api_key_var=variable, max_retries=0)
            output = await self._env.run_rollout(dict(row), client, asked["model"], {})
        finally:
            del os.environ[variable]
        truncated = bool(output["is_truncated"])
        if output["stop_condition"] == "prompt_too_long" and self._truncated_reward is not None:
            return {"reward": self._truncated_reward, "parts": {"truncated": 1.0}}
        if output["error"] or not output["is_completed"]:
            raise RolloutFailedError(str(output["error"] or "the rollout is not completed")[:2000])
        if raised:
            raise RolloutFailedError("; ".join(raised)[:2000])
        parts = {name: value for name, value in (output["metrics"] or {}).items() if value is not None}
        return {"reward": output["reward"], "parts": {**parts, "truncated": float(truncated)}}

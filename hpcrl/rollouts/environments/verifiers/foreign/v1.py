"""Environments of verifiers 0.4 and newer: tasksets, their environments and harnesses, in this process.

Each rollout is an episode of verifiers. Its model client gets the address and the key of the rollout's endpoint at
hpcrl's gateway, which records all tokens: nothing of verifiers' own record of them is used. Rewards and metrics are.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

vf: Any = importlib.import_module("verifiers.v1")
loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
agent_configs: Any = importlib.import_module("verifiers.v1.configs.agent")
runtimes: Any = importlib.import_module("verifiers.v1.runtimes.subprocess")
client_configs: Any = importlib.import_module("verifiers.v1.configs.client")

_packages: Any = sys.modules["hpcrl_verifiers_packages"]
WrongSettingError, RolloutFailedError = _packages.WrongSettingError, _packages.RolloutFailedError
ALL_AGENTS = "*"
"""Value of ``agent`` for environments whose agents are all the policy."""
_CONTEXT = "context_length_exceeded"
_DEPENDENCIES = re.compile(r"^# dependencies = (\[.*?\])$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request for a rollout."""

    id: int
    split: str
    index: int
    url: str
    key: str
    model: str


def make(build: dict[str, Any], package: str, splits: ModuleType) -> V1Backend:
    """Make the environment that the recipe describes.

    Raises
    ------
    WrongSettingError
        The package, its arguments or its agents are wrong.
    """
    _use_installed_packages()
    config = _config(build, package)
    try:
        env = loaders.load_environment(config)
    except Exception as error:
        raise WrongSettingError("args", f"{package} cannot be made: {type(error).__name__}: {error}") from error
    agents = _policy_agents(config, build["agent"])
    if not build["host_commands"]:
        _check_sandboxed(env, config)
    held_out = None
    if build["held_out_args"] is not None:
        other = _config({**build, "args": build["held_out_args"]}, package, key="held_out_args")
        view = _limited(loaders.load_taskset(other.taskset), build["max_tasks"])
        if not view.bounded:
            raise WrongSettingError("held_out_args", "these tasks have no end", "give max_tasks")
        held_out = _read(view, "held_out_args")
    view = _limited(env.taskset, build["max_tasks"])
    stream = _read(view, "args") if view.bounded else iter(view)
    tasks = splits.TaskSplits(
        stream,
        lambda task: task.data.model_dump(mode="json"),
        share=build["held_out_share"],
        held_out=held_out,
        finite=view.bounded,
    )
    notes = []
    if tasks.left_out:
        notes.append(f"{tasks.left_out} training tasks are left out: held-out tasks ask the same")
    return V1Backend(env, tasks, agents, truncated_reward=build["truncated_reward"], notes=notes)


def _config(build: dict[str, Any], package: str, *, key: str = "args") -> Any:
    """Return the configuration of the environment of verifiers: without retries, and on this machine."""
    given = json.loads(json.dumps(build["settings"]))
    if "taskset" in given:
        raise WrongSettingError("settings", "taskset is given by package and args", "move its fields to args")
    try:
        kind = loaders.env_config_type(package, given.get("id") or "")
        bundled = loaders.default_harness_id(package)
    except Exception as error:
        where = "path" if build["path"] is not None else "package"
        raise WrongSettingError(where, f"it cannot be imported: {type(error).__name__}: {error}") from error
    given["taskset"] = {**build["args"], "id": package}
    # the servers of verifiers are not shared: each rollout has its own, and its own client
    given.setdefault("interception", {"type": "server"})
    for name, field in kind.model_fields.items():
        if not isinstance(field.default, agent_configs.AgentConfig):
            continue
        agent = given.setdefault(name, {})
        if not isinstance(agent, dict):
            raise WrongSettingError(f"settings.{name}", "this is an agent: its fields are expected")
        agent.setdefault("runtime", {"type": "subprocess"})
        if field.default.harness is None and bundled == "bash":
            agent.setdefault("harness", {"id": "null"})
    try:
        config = loaders.resolve_env_config(given)
    except Exception as error:
        raise WrongSettingError(key, _shown(error), f"the fields of {kind.__name__} are expected") from error
    _check_retries(config)
    return config


def _shown(error: Exception) -> str:
    """Return what is wrong with settings: pydantic's errors, a line each."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'settings'}: {each['msg']}" for each in errors()[:8])


def _check_retries(config: Any) -> None:
    """Refuse repetitions inside verifiers: the tokens of a failed attempt would count for the reward of the next."""
    roles = agent_configs.agent_config_fields(config)
    for key, retries in [("retries", config.retries), *((f"{name}.retries", r.retries) for name, r in roles.items())]:
        if retries.max_retries or any(rule.max_retries for rule in retries.rules):
            what = "verifiers would repeat a failed rollout, and its turns would be trained on"
            raise WrongSettingError(f"settings.{key}", what, "leave it out: hpcrl replaces failed rollouts")


def _policy_agents(config: Any, wanted: str | None) -> tuple[str, ...]:
    """Return the agents whose rewards count."""
    roles = agent_configs.agent_config_fields(config)
    policy = tuple(name for name, role in roles.items() if role.client is None)
    if not policy:
        raise WrongSettingError("settings", "all agents have a client of their own: none is the policy")
    if wanted is None and len(policy) == 1:
        return policy
    if wanted == ALL_AGENTS:
        return policy
    known = ", ".join(roles)
    if wanted is None:
        hint = f"set agent to one of them and give others a client in settings, or agent: '{ALL_AGENTS}' for the mean"
        raise WrongSettingError("agent", f"the environment has several agents: {known}", hint)
    if wanted not in roles:
        raise WrongSettingError("agent", f"there is no agent {wanted!r}", f"the agents are: {known}")
    if others := [name for name in policy if name != wanted]:
        what = f"{', '.join(others)} would be the policy too, and be trained for the reward of {wanted}"
        raise WrongSettingError("agent", what, f"give settings.{others[0]}.client, or agent: '{ALL_AGENTS}'")
    return (wanted,)


def _check_sandboxed(env: Any, config: Any) -> None:
    """Refuse harnesses that run a model's commands on this machine without a sandbox."""
    for name, role in agent_configs.agent_config_fields(config).items():
        harness = role.harness.id if role.harness is not None else env._default_harness.id
        if role.runtime.type == "subprocess" and loaders.harness_class(harness).EXECUTES_CODE:
            what = f"the harness {harness} of {name} runs commands of the model on this machine, without a sandbox"
            hint = f"set settings.{name}.runtime.type (apptainer, docker), another harness, or host_commands: true"
            raise WrongSettingError(f"settings.{name}", what, hint)


def _limited(taskset: Any, most: int | None) -> Any:
    return taskset if most is None else taskset.take(most)


def _read(view: Any, key: str) -> list[Any]:
    try:
        return list(view)
    except Exception as error:
        raise WrongSettingError(key, f"the tasks cannot be read: {type(error).__name__}: {error}") from error


def _use_installed_packages() -> None:
    """Let programs of harnesses run with the packages of this interpreter.

    verifiers would make an environment for each of them with uv, which needs a package index: nodes have none.
    """

    async def prepare(
        self: Any, script: str | bytes, env: Mapping[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        text = script if isinstance(script, str) else script.decode()
        if (found := _DEPENDENCIES.search(text)) is not None:
            _check_installed([re.split(r"[<>=!~\[; ]", each, maxsplit=1)[0] for each in json.loads(found[1])])
        path = Path(self.scripts_dir) / f"{hashlib.sha256(text.encode()).hexdigest()}.py"
        if not path.exists():
            # rollouts that begin together write it together
            part = f"{path}.{uuid.uuid4().hex}.tmp"
            await self.write(part, text.encode())
            await asyncio.to_thread(os.replace, part, path)
        return [sys.executable, str(path)]

    runtimes.SubprocessRuntime.prepare_uv_script = prepare


def _check_installed(packages: list[str]) -> None:
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise RuntimeError(f"the harness needs {package}: {sys.executable} -m pip install {package}") from None


class V1Backend:
    """Tasks and rollouts of one environment.

    Attributes
    ----------
    notes:
        What is odd about it, a sentence each.
    """

    def __init__(
        self, env: Any, tasks: Any, agents: tuple[str, ...], *, truncated_reward: float | None, notes: list[str]
    ) -> None:
        self._env, self._tasks, self._agents = env, tasks, agents
        self._truncated_reward = truncated_reward
        self.notes = notes

    def task(self, split: str, index: int) -> dict[str, Any]:
        """Return the messages of a task."""
        data = self._tasks.task(split, index).data
        messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(data.prompt, str):
            messages.append({"role": "user", "content": data.prompt})
        elif data.prompt:
            messages += [{"role": each.role, "content": _text(each.content)} for each in data.prompt]
        else:
            # the environment opens the conversation: what it will say is not known here
            fields = {k: v for k, v in data.model_dump(mode="json", exclude_defaults=True).items() if k != "idx"}
            messages.append({"role": "user", "content": json.dumps(fields, sort_keys=True)})
        return {"messages": messages}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold what rollouts share: tool servers of the taskset."""
        async with self._env.serving():
            # without one that is shared, each run of an agent has a server of its own, which closes its client
            self._env._interception = None
            yield

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Play one episode; returns its reward and named parts.

        Raises
        ------
        RolloutFailedError
            It has failed, or has no reward.
        """
        request = _Asked(**{field.name: asked[field.name] for field in dataclasses.fields(_Asked)})
        task = self._tasks.task(request.split, request.index)
        # programs of harnesses inherit no variable with API_KEY in its name
        variable = f"HPCRL_ROLLOUT_API_KEY_{request.id}"
        os.environ[variable] = request.key
        try:
            client = client_configs.EvalClientConfig(base_url=request.url, api_key_var=variable)
            context = vf.ModelContext(model=request.model, client=client)
            episode = await self._env.run_episode(task, context)
        finally:
            del os.environ[variable]
        return self._judged(episode)

    def _judged(self, episode: Any) -> dict[str, Any]:
        traces = [trace for trace in episode.traces if (trace.agent.name or self._agents[0]) in self._agents]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        # some harnesses end a conversation that is too long, others fail
        too_long = any(_CONTEXT in str(error.message) for error in errors)
        too_long = too_long or any(trace.calls and _CONTEXT in str(trace.calls[-1].error) for trace in traces)
        if too_long and self._truncated_reward is not None:
            return {"reward": self._truncated_reward, "parts": {"truncated": 1.0}}
        if not episode.ok:
            said = "; ".join(f"{error.type}: {error.message}" for error in errors[-3:])
            raise RolloutFailedError(said or "the episode is not ok, and has no error")
        rewards: list[float] = []
        named: dict[str, list[float]] = {}
        for trace in traces:
            if not trace.rewards or any(each is None for each in trace.rewards.values()):
                raise RolloutFailedError(f"there is no reward: {sorted(trace.rewards or {})}")
            rewards.append(float(trace.reward))
            prefix = f"{trace.agent.name}/" if len(self._agents) > 1 else ""
            found = {name: each.score for name, each in trace.rewards.items()}
            found |= {name: value for name, value in (trace.metrics or {}).items() if value is not None}
            for name, value in found.items():
                named.setdefault(f"{prefix}{name}", []).append(float(value))
        if not rewards:
            raise RolloutFailedError(f"no agent of {', '.join(self._agents)} has played")
        # an agent may have played several times
        parts = {name: sum(values) / len(values) for name, values in named.items()}
        parts["truncated"] = float(too_long or any(trace.is_truncated for trace in traces))
        return {"reward": sum(rewards) / len(rewards), "parts": parts}


def _text(content: Any) -> str:
    """Return the text of a message; other parts are named by their kind."""
    if isinstance(content, str):
        return content
    return "\n".join(getattr(part, "text", f"[{part.type}]") for part in content or [])

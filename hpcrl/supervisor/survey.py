"""What must be known of nodes before roles are started on them: where each can be reached, and how far its clock is off.

One task a node (`hpcrl.supervisor.node_answers`) tells the addresses of its interfaces and answers questions about the
time. Only the node knows the first: Slurm's ``NodeAddr`` may be on the management network, and the batch node's own name
often is 127.0.1.1 on itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from hpcrl.errors import HpcrlError
from hpcrl.interfaces import only_local, preferred, resolve
from hpcrl.runs.clocks import Clock

__all__ = ["NodeAnswer", "NodesSilentError", "Survey", "choose_addresses"]

_log = logging.getLogger(__name__)
_ROUNDS = 5
"""Questions about the time; the shortest round trip counts."""
_ANSWER_S = 30.0
_END_S = 10.0
_WORDS = 3
_SLURMS = "the address that Slurm has"


class NodesSilentError(HpcrlError):
    """The step on the nodes did not start, or ended before all of its nodes had answered."""


class NodeAnswer(NamedTuple):
    """What a node said.

    Attributes
    ----------
    node:
        Slurm's name of it.
    machine:
        `hpcrl.interfaces.machine_id`: nodes with the same one share their loopback interface.
    interfaces:
        Addresses of each.
    """

    node: str
    machine: str
    interfaces: Mapping[str, Sequence[str]]


class Survey:
    """Tasks on nodes that answer questions; a context manager, which ends them.

    Parameters
    ----------
    commands:
        Command lines (``srun …``), each with its nodes.
    env:
        Their environment.
    timeout_s:
        Longest wait for the first answer of all nodes.

    Raises
    ------
    NodesSilentError
        On entering: not all nodes answered.
    """

    def __init__(
        self, commands: Sequence[tuple[Sequence[str], Sequence[str]]], *, env: Mapping[str, str], timeout_s: float
    ) -> None:
        self._commands, self._env, self._timeout_s = commands, env, timeout_s
        self._expected = {node for _, nodes in commands for node in nodes}
        self._lines: queue.SimpleQueue[tuple[float, dict[str, Any]] | None] = queue.SimpleQueue()
        self._steps: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        self._asked = 0
        self.answers: dict[str, NodeAnswer] = {}

    def __enter__(self) -> Survey:
        try:
            for argv, _ in self._commands:
                self._start(argv)
            for answer in self._collect(self._timeout_s).values():
                said = answer[1]
                self.answers[said["node"]] = NodeAnswer(said["node"], said["machine"], said["interfaces"])
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def clocks(self) -> dict[str, Clock]:
        """How far the clock of each node is ahead of ours.

        Raises
        ------
        NodesSilentError
            A node stopped answering.
        """
        best: dict[str, Clock] = {}
        for _ in range(_ROUNDS):
            asked_s, began = time.time(), time.monotonic()
            for node, (arrived, said) in self._ask().items():
                half_s = (arrived - began) / 2
                clock = Clock(ahead_s=said["time_s"] - (asked_s + half_s), uncertain_s=half_s)
                if node not in best or clock.uncertain_s < best[node].uncertain_s:
                    best[node] = clock
        return best

    def towards(self, host: str) -> dict[str, str]:
        """The address of each node that ``host`` sees; nodes without a way to it are left out."""
        return {node: said["towards"] for node, (_, said) in self._ask(towards=host).items() if "towards" in said}

    def _ask(self, **question: str) -> dict[str, tuple[float, dict[str, Any]]]:
        self._asked += 1
        line = json.dumps({"number": self._asked, **question}).encode() + b"\n"
        for process, _ in self._steps:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `_collect` says who is missing
                process.stdin.write(line)
                process.stdin.flush()
        return self._collect(_ANSWER_S, number=self._asked)

    def _start(self, argv: Sequence[str]) -> None:
        words = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `_end`
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, env=dict(self._env)
        )
        self._steps.append((process, words))
        threading.Thread(target=self._listen, args=(process,), name="node answers", daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in iter(process.stdout.readline, b""):
            arrived = time.monotonic()
            try:
                said = json.loads(line)
            except ValueError:
                continue  # a site's greeting
            if isinstance(said, dict) and "node" in said:
                self._lines.put((arrived, said))
        self._lines.put(None)

    def _collect(self, timeout_s: float, *, number: int | None = None) -> dict[str, tuple[float, dict[str, Any]]]:
        """One answer of each node to a question (None: to none)."""
        deadline = time.monotonic() + timeout_s
        found: dict[str, tuple[float, dict[str, Any]]] = {}
        while missing := self._expected - set(found):
            try:
                answer = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._silent(missing, f"within {timeout_s:g} s") from None
            if answer is None:
                raise self._silent(missing, "before their step ended")
            if answer[1].get("number") == number and answer[1]["node"] in missing:
                found[answer[1]["node"]] = answer
        return found

    def _silent(self, missing: set[str], when: str) -> NodesSilentError:
        words: list[str] = []
        for _, stream in self._steps:
            stream.seek(0)
            words += stream.read().decode(errors="replace").strip().splitlines()[-_WORDS:]
        names = ", ".join(sorted(missing)[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        said = "".join(f"\n    {line}" for line in words)
        return NodesSilentError(
            f"{len(missing)} of {len(self._expected)} nodes did not say where they can be reached {when}: {names}{said}\n"
            "    way out: `srun --overlap hostname` in the job shows whether steps start there; a longer "
            "limits.start_timeout_s where they start slowly"
        )

    def _end(self) -> None:
        for process, words in self._steps:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                _log.warning("the step that asked nodes (pid %d) did not end by itself", process.pid)
                process.kill()
                process.wait()
            words.close()
        self._steps.clear()


def choose_addresses(
    survey: Survey, *, interfaces: Mapping[str, str | None], known: Mapping[str, str], several: bool
) -> dict[str, str]:
    """Where each node can be reached by the others, and listens.

    Parameters
    ----------
    survey:
        Has asked the nodes.
    interfaces:
        The interface that the profile names for each node; None where it names none.
    known:
        What Slurm calls each node (``NodeAddr``, else its name).
    several:
        Whether the run has other nodes, so that loopback will not do.

    Raises
    ------
    HpcrlError
        A node has not the interface, or no address that others can reach; names both.
    """
    machines = {answer.machine for answer in survey.answers.values()}
    # nodes of a virtual cluster share a machine: loopback is a network like any other there
    local = not several or len(machines) == 1
    seen = {node: _seen(known[node]) for node in survey.answers}
    chosen: dict[str, str] = {}
    open_nodes: list[NodeAnswer] = []
    for node, answer in sorted(survey.answers.items()):
        interface = interfaces[node]
        if interface is not None:
            chosen[node] = _of_interface(answer, interface, seen[node], local=local)
        elif seen[node] and (local or (not only_local(seen[node]) and _has(answer, seen[node]))):
            chosen[node] = seen[node]
        else:
            open_nodes.append(answer)
    if open_nodes:
        chosen |= _by_route(survey, open_nodes, chosen, known)
    return chosen


def _seen(host: str) -> str:
    try:
        return resolve(host)
    except OSError:
        return ""


def _has(answer: NodeAnswer, address: str) -> bool:
    return any(address in addresses for addresses in answer.interfaces.values())


def _of_interface(answer: NodeAnswer, interface: str, seen: str, *, local: bool) -> str:
    if interface not in answer.interfaces:
        raise HpcrlError(
            f"node {answer.node} has no network interface {interface} that is up; it has "
            f"{', '.join(sorted(answer.interfaces))}\n    way out: correct `interface` of its partition in the cluster profile"
        )
    mine = answer.interfaces[interface]
    # all of 127.0.0.0/8 is on the loopback interface, and virtual nodes have an address of their own there
    loops = any(only_local(address) == "loopback" for address in mine)
    if local and loops and seen and only_local(seen) == "loopback":
        return seen
    usable = [address for address in mine if local or not only_local(address)]
    if seen in usable:
        return seen
    best = preferred(usable)
    if best is None:
        has = ", ".join(f"{address} ({only_local(address)})" for address in mine) or "no address"
        raise HpcrlError(
            f"interface {interface} of node {answer.node} has no address that the run's other nodes could reach: {has}\n"
            "    way out: name an interface with an address of the nodes' network in the cluster profile"
        )
    return best


def _by_route(
    survey: Survey, open_nodes: Sequence[NodeAnswer], chosen: Mapping[str, str], known: Mapping[str, str]
) -> dict[str, str]:
    """Addresses of nodes that Slurm's name does not lead to, by the way that they take to another node."""
    if not chosen:
        node = open_nodes[0].node
        raise HpcrlError(
            f"no node of the run can be reached by {_SLURMS}: {node} is {known[node]}, which is "
            f"{_seen(known[node]) or 'unknown'} here, and the cluster profile names no interface\n"
            "    way out: set `interface` of the partition in the cluster profile (`ip -br address` on a node lists them)"
        )
    target_node, target = next(iter(chosen.items()))
    ways = survey.towards(target)
    found: dict[str, str] = {}
    for answer in open_nodes:
        way = ways.get(answer.node, "")
        if not way or only_local(way):
            raise HpcrlError(
                f"node {answer.node} cannot be reached by {_SLURMS} ({known[answer.node]}: "
                f"{_seen(known[answer.node]) or 'unknown'} here), and its way to {target_node} ({target}) begins at "
                f"{way or 'nowhere'}\n    way out: set `interface` of the partition in the cluster profile"
            )
        found[answer.node] = way
    return found

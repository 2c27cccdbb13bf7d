"""Asks all nodes, before roles are started there, for their addresses and the offsets of their clocks.

One task per node (`hpcrl.supervisor.launch.node_answers`) reports the addresses of its interfaces and answers
questions about the time and the route to other hosts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import IO, Any, NamedTuple

from hpcrl.errors import HpcrlError
from hpcrl.runs.clocks import NodeClock
from hpcrl.supervisor.process.report_lines import DamagedLineError, LineSplitter, find_lines

_log = logging.getLogger(__name__)
_ROUNDS = 5
"""Questions about the time; the shortest round trip counts."""
_ANSWER_S = 30.0
_END_S = 10.0
_WORDS = 3
_PIECE = 1 << 16


class NodesSilentError(HpcrlError):
    """The step on the nodes did not start, or ended before all of its nodes had answered.

    Attributes
    ----------
    nodes:
        Nodes that had not answered; where the step ended early, healthy ones may be among them.
    """

    def __init__(self, message: str, nodes: Collection[str] = ()) -> None:
        super().__init__(message)
        self.nodes = frozenset(nodes)


class NodeAnswer(NamedTuple):
    """Answer of a node to the survey.

    Attributes
    ----------
    node:
        Slurm's name of the node.
    machine:
        `hpcrl.network.interfaces.machine_id`: nodes with the same one share their loopback interface.
    interfaces:
        Addresses of each interface.
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
        Environment of the tasks.
    timeout_s:
        Timeout in seconds for the first answers of all nodes.

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
        self._listeners: list[threading.Thread] = []
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
            self._end(0.0)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def clocks(self) -> dict[str, NodeClock]:
        """Return the offset of each node's clock from the clock of this machine.

        Raises
        ------
        NodesSilentError
            A node stopped answering.
        """
        best: dict[str, NodeClock] = {}
        for _ in range(_ROUNDS):
            asked_s, began = time.time(), time.monotonic()
            for node, (arrived, said) in self._ask().items():
                half_s = (arrived - began) / 2
                clock = NodeClock(ahead_s=said["time_s"] - (asked_s + half_s), uncertain_s=half_s)
                if node not in best or clock.uncertain_s < best[node].uncertain_s:
                    best[node] = clock
        return best

    def towards(self, host: str) -> dict[str, str]:
        """Return the address of each node that ``host`` sees; nodes without a route to it are left out."""
        return {node: said["towards"] for node, (_, said) in self._ask(towards=host).items() if "towards" in said}

    def _ask(self, **question: str) -> dict[str, tuple[float, dict[str, Any]]]:
        self._asked += 1
        line = json.dumps({"number": self._asked, **question}).encode() + b"\n"
        for process, _ in self._steps:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `_collect` reports the missing nodes
                process.stdin.write(line)
                process.stdin.flush()
        return self._collect(_ANSWER_S, number=self._asked)

    def _start(self, argv: Sequence[str]) -> None:
        words = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `_end`
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, env=dict(self._env)
        )
        self._steps.append((process, words))
        listener = threading.Thread(target=self._listen, args=(process,), name="node answers", daemon=True)
        listener.start()
        self._listeners.append(listener)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            splitter = LineSplitter()
            ended = False
            while not ended:
                data = os.read(stream.fileno(), _PIECE)
                arrived, ended = time.monotonic(), not data
                for line in splitter.add(data):
                    # a damaged answer is one that is missing: its node is named when the time is over
                    with contextlib.suppress(DamagedLineError):
                        for said in find_lines(line):
                            self._lines.put((arrived, said))
        self._lines.put(None)

    def _collect(self, timeout_s: float, *, number: int | None = None) -> dict[str, tuple[float, dict[str, Any]]]:
        """Return one answer of each node to question ``number`` (None: the unasked first report)."""
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
            f"{len(missing)} of {len(self._expected)} nodes did not report an address {when}: "
            f"{names}{said}\n"
            "    hint: `srun --overlap hostname` in the job shows whether steps start there; a longer "
            "limits.start_timeout_s where they start slowly",
            missing,
        )

    def _end(self, limit_s: float = _END_S) -> None:
        for process, words in self._steps:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                _log.warning("the step that asked nodes (pid %d) did not end by itself and is killed", process.pid)
                process.kill()
                process.wait()
            words.close()
        for listener in self._listeners:
            listener.join(_END_S)
        self._steps.clear()

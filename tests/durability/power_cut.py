"""Every state that a power cut could leave, from a recording: by the rules of POSIX, of NFS, or of many clients.

POSIX promises little. What was written to a file and not fsynced may be there, be missing, be zeros, or be there in
part. A name that was made, renamed or removed may be so or not, each independently of the others, until the directory
was fsynced that holds it. Two things are assumed beyond the letter of the standard, because nothing could be built
without them and every filesystem with a journal keeps them: a rename happens as a whole or not at all, and it is
durable once the directory of its *new* name was fsynced.

NFS: the server makes each change of a name durable, in order, before it answers. What a client wrote it may keep to
itself until it closes or fsyncs the file: that is lost with the client, or not seen by others.

Clients of a parallel filesystem: as NFS, but closing a file flushes nothing, and an fsync flushes what the same client
has written. Each process counts as a client.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from recording import Kind, Operation

Rules = Literal["posix", "nfs", "clients"]
Variant = Literal["lost", "zeros", "torn", "full"]
#: contents of a directory: bytes of files, None for directories, the target's text for symbolic links; by path
State = dict[str, "bytes | str | None"]

_NEVER = 1 << 60
_BLOCK_BYTES = 512


@dataclass(eq=False)
class _Node:
    """A file, directory or symbolic link, whatever its names."""

    kind: Literal["file", "directory", "link"]
    target: str = ""
    writes: list[_Write] = field(default_factory=list)


@dataclass(eq=False)
class _Write:
    """A change of a file's bytes or size, and when it became durable."""

    at: int
    pid: int
    offset: int
    data: bytes | None
    truncates: bool = False
    durable_at: int = _NEVER


@dataclass(eq=False)
class _Entry:
    """A change of names: one name goes, another comes, or both at once."""

    at: int
    node: _Node
    gone: tuple[_Node, str] | None
    new: tuple[_Node, str] | None
    durable_at: int = _NEVER

    @property
    def keeper(self) -> _Node:
        """The directory whose fsync makes it durable."""
        place = self.new or self.gone
        assert place is not None
        return place[0]


class Cut(NamedTuple):
    """A moment of the recording: after ``at`` operations; and what was marked until then."""

    at: int
    marks: tuple[object, ...]


class PowerCuts:
    """The states that cuts of one recording could leave.

    Attributes
    ----------
    cuts:
        All moments, in order.
    final:
        What there is at the end where nothing is lost.
    """

    def __init__(
        self, operations: Sequence[Operation], *, rules: Rules = "posix", without: Collection[str] = ()
    ) -> None:
        """Follow a recording.

        Parameters
        ----------
        without:
            Sites whose fsyncs are left out, as if they were not in the code.
        """
        self._rules = rules
        self._root = _Node("directory")
        self._entries: list[_Entry] = []
        self._files: list[_Node] = []
        self._names: dict[_Node, dict[str, _Node]] = {self._root: {}}
        self._inodes: dict[int, _Node] = {}
        self.cuts: list[Cut] = [Cut(0, ())]
        marks: list[object] = []
        for at, operation in enumerate(operations, start=1):
            if operation.kind is Kind.MARK:
                marks.append(json.loads(operation.first))
            elif operation.kind is not Kind.SYNC or operation.site not in without:
                self._follow(at, operation)
            self.cuts.append(Cut(at, tuple(marks)))
        everything = self._chosen(_NEVER - 1, set(self._entries))
        self.final = self._tree(everything, dict.fromkeys(self._files, "full"), _NEVER - 1, None)

    # -- following the recording

    def _follow(self, at: int, operation: Operation) -> None:
        kind = operation.kind
        if kind is Kind.CREATE:
            self._create(at, operation)
        elif kind is Kind.MKDIR:
            node = _Node("directory")
            self._names[node] = {}
            self._inodes[operation.inode] = node
            self._change(at, node, None, self._place(operation.first))
        elif kind is Kind.SYMLINK:
            self._change(at, _Node("link", target=operation.first), None, self._place(operation.second))
        elif kind is Kind.LINK:
            self._change(at, self._node(operation.first), None, self._place(operation.second))
        elif kind is Kind.RENAME:
            node, old = self._node(operation.first), self._place(operation.first)
            self._change(at, node, old, self._place(operation.second))
        elif kind in (Kind.UNLINK, Kind.RMDIR):
            self._change(at, self._node(operation.first), self._place(operation.first), None)
        elif kind is Kind.MAP:
            raise AssertionError("a file is written through a mapping: the recorder does not see what and when")
        else:
            self._change_file(at, operation)

    def _create(self, at: int, operation: Operation) -> None:
        place = self._place(operation.first)
        node = self._names[place[0]].get(place[1])
        if node is None:
            node = _Node("file")
            self._files.append(node)
            self._change(at, node, None, place)
        elif operation.offset == 0:
            node.writes.append(_Write(at, operation.pid, 0, None, truncates=True))
        self._inodes[operation.inode] = node

    def _change_file(self, at: int, operation: Operation) -> None:
        node, kind = self._inodes.get(operation.inode), operation.kind
        if node is None:  # the root itself, or a file that lost its name before
            node = self._root
        if kind is Kind.WRITE:
            node.writes.append(_Write(at, operation.pid, operation.offset, operation.data))
        elif kind in (Kind.TRUNCATE, Kind.EXTEND):
            node.writes.append(_Write(at, operation.pid, operation.offset, None, truncates=kind is Kind.TRUNCATE))
        elif node.kind == "directory":
            if kind is Kind.SYNC:
                for entry in self._entries:
                    if entry.keeper is node:
                        entry.durable_at = min(entry.durable_at, at)
        elif kind is Kind.SYNC or self._rules == "nfs":
            for write in node.writes:
                if self._rules == "posix" or write.pid == operation.pid:
                    write.durable_at = min(write.durable_at, at)

    def _change(self, at: int, node: _Node, gone: tuple[_Node, str] | None, new: tuple[_Node, str] | None) -> None:
        entry = _Entry(at, node, gone, new)
        if self._rules != "posix":
            entry.durable_at = at
        self._entries.append(entry)
        if gone is not None:
            del self._names[gone[0]][gone[1]]
        if new is not None:
            self._names[new[0]][new[1]] = node

    def _place(self, path: str) -> tuple[_Node, str]:
        *parents, name = path.strip("/").split("/")
        node = self._root
        for part in parents:
            node = self._names[node][part]
        return node, name

    def _node(self, path: str) -> _Node:
        directory, name = self._place(path)
        return self._names[directory][name]

    # -- states

    def states(self, cut: Cut, *, limit: int, rng: random.Random) -> Iterator[State]:
        """States that a cut could leave: all, where these are at most ``limit``; else so many of them.

        Of the latter the corners come first: nothing that was not durable, all of it, names without data, each
        change alone missing, each alone there.
        """
        open_entries, open_files = self._undecided(cut.at)
        kinds: tuple[Variant, ...] = ("lost", "zeros", "torn", "full")
        count = 2 ** len(open_entries) * len(kinds) ** len(open_files)
        if count <= limit:
            for happened in itertools.product((False, True), repeat=len(open_entries)):
                for variants in itertools.product(kinds, repeat=len(open_files)):
                    chosen = {entry for entry, yes in zip(open_entries, happened, strict=True) if yes}
                    yield self._state(cut.at, chosen, dict(zip(open_files, variants, strict=True)), None)
            return
        corners = itertools.islice(self._corners(open_entries, open_files), max(limit // 2, 8))
        made = 0
        for made, (chosen, files) in enumerate(corners, start=1):  # noqa: B007 - how many there were
            yield self._state(cut.at, chosen, files, None)
        for _ in range(limit - made):
            share = rng.choice((0.1, 0.5, 0.9))
            chosen = {entry for entry in open_entries if rng.random() < share}
            yield self._state(cut.at, chosen, {file: rng.choice(kinds) for file in open_files}, rng)

    @staticmethod
    def _corners(entries: list[_Entry], files: list[_Node]) -> Iterator[tuple[set[_Entry], dict[_Node, Variant]]]:
        everything = set(entries)
        yield everything, dict.fromkeys(files, "lost")
        yield set(), dict.fromkeys(files, "lost")
        yield everything, dict.fromkeys(files, "zeros")
        yield everything, dict.fromkeys(files, "torn")
        yield everything, dict.fromkeys(files, "full")
        # the newest first: they are what the code has just done
        for entry in reversed(entries):
            yield everything - {entry}, dict.fromkeys(files, "full")
            yield {entry}, dict.fromkeys(files, "full")

    def _undecided(self, at: int) -> tuple[list[_Entry], list[_Node]]:
        """What may have happened or not, as far as it matters: what nobody can reach any more is left out."""
        pending = [entry for entry in self._entries if entry.at <= at < entry.durable_at]
        names = self._chosen(at, set())
        added: dict[_Node, list[_Node]] = {}
        for entry in pending:
            if entry.new is not None:
                added.setdefault(entry.new[0], []).append(entry.node)
        reachable, waiting = {self._root}, [self._root]
        while waiting:
            node = waiting.pop()
            for child in (*names.get(node, {}).values(), *added.get(node, ())):
                if child not in reachable:
                    reachable.add(child)
                    waiting.append(child)
        entries = [e for e in pending if any(place and place[0] in reachable for place in (e.gone, e.new))]
        files = [f for f in self._files if f in reachable and any(w.at <= at < w.durable_at for w in f.writes)]
        return entries, files

    def _chosen(self, at: int, chosen: set[_Entry]) -> dict[_Node, dict[str, _Node]]:
        """Names in each directory, where beside what is durable only ``chosen`` happened."""
        names: dict[_Node, dict[str, _Node]] = {}
        for entry in self._entries:
            if entry.at > at or (entry.durable_at > at and entry not in chosen):
                continue
            if entry.gone is not None:
                directory = names.setdefault(entry.gone[0], {})
                if directory.get(entry.gone[1]) is entry.node:
                    del directory[entry.gone[1]]
            if entry.new is not None:
                names.setdefault(entry.new[0], {})[entry.new[1]] = entry.node
        return names

    def _state(self, at: int, chosen: set[_Entry], files: dict[_Node, Variant], rng: random.Random | None) -> State:
        return self._tree(self._chosen(at, chosen), files, at, rng)

    def _tree(
        self,
        names: dict[_Node, dict[str, _Node]],
        files: dict[_Node, Variant],
        at: int,
        rng: random.Random | None,
    ) -> State:
        state: State = {}
        waiting = [("", self._root)]
        while waiting:
            path, directory = waiting.pop()
            for name, node in names.get(directory, {}).items():
                below = f"{path}/{name}"
                if node.kind == "directory":
                    state[below] = None
                    waiting.append((below, node))
                else:
                    state[below] = node.target if node.kind == "link" else _content(node, files.get(node), at, rng)
        return state


def _content(node: _Node, variant: Variant | None, at: int, rng: random.Random | None) -> bytes:
    """Bytes of a file after a cut; pending changes as ``variant`` says, single blocks at random with ``rng``."""
    content = bytearray()
    pending = [write for write in node.writes if write.at <= at < write.durable_at]
    room = sum(len(write.data or b"") for write in pending) // 2
    for write in node.writes:
        if write.at > at:
            continue
        durable = write.durable_at <= at or variant == "full"
        if not durable and variant == "lost":
            continue
        if write.data is None:
            if write.truncates:
                del content[write.offset :]
            content.extend(bytes(max(0, write.offset - len(content))))
            continue
        content.extend(bytes(max(0, write.offset + len(write.data) - len(content))))
        for begin in range(0, len(write.data), _BLOCK_BYTES):
            block = write.data[begin : begin + _BLOCK_BYTES]
            if not durable:
                if variant == "zeros" or (variant == "torn" and rng is None and room <= 0):
                    continue
                if variant == "torn" and rng is not None and rng.random() < 0.5:
                    continue
                if variant == "torn" and rng is None:
                    block = block[:room]
                    room -= len(block)
            content[write.offset + begin : write.offset + begin + len(block)] = block
    return bytes(content)


def tree_of(root: Path) -> State:
    """What lies below a directory, in the form of a `State`."""
    state: State = {}
    for path in root.rglob("*"):
        name = f"/{path.relative_to(root)}"
        if path.is_symlink():
            state[name] = str(path.readlink())
        else:
            state[name] = None if path.is_dir() else path.read_bytes()
    return state


def write_tree(state: State, root: Path) -> None:
    """Make a directory of a `State`."""
    root.mkdir(parents=True)
    for name in sorted(state):
        path, content = root / name[1:], state[name]
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def digest(state: State) -> int:
    """Equal for equal states, within one process."""
    return hash(frozenset(state.items()))


def marks_of(cut: Cut, kind: str) -> Iterable[list[object]]:
    """What was marked as ``[kind, …]`` until the cut, without the kind."""
    for said in cut.marks:
        if isinstance(said, list) and said[0] == kind:
            yield said[1:]

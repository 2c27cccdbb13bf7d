"""Trials: a publisher and a collector are killed at random points while readers load; what must hold is checked.

In each trial a publisher publishes version after version and a collector removes old ones, both forked. Each is
killed (SIGKILL): in every fourth trial at a random moment, in the others at a random one of its calls of the
filesystem. Readers live through many trials, load the newest version over and over, compare every byte with what it
must be, and acknowledge; now and then one of them is killed, too. Then a publisher and a collector start anew, as after
a restart, and the rest must be right without anybody's help.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

from handoff_lab import check_content, model_directory, publish, publish_delta
from kill_harness import Child, Say, die_at_call, fork_child

from hpcrl.errors import HandoffError
from hpcrl.weights import HandoffStore, VersionCommitter
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.lifetime.leases import ReaderWatch
from hpcrl.weights.read.share import Pace
from hpcrl.weights.read.subscriber import ReaderSettings, Subscriber

EXPIRY_S = 5.0
KEEP_LAST = 2
WORDS = 2000
CHAIN = 4
"""A full version and three deltas, and again."""
CALLS = 150
"""Calls of the filesystem up to which a process is killed: a publication makes some 40, a pass of the collector too."""
PUBLICATIONS = 3.0
"""Kills fall within the time that so many publications take: before, into and after one and a pass of the collector."""


class HandoffTrials:
    """One store, its readers, and what was seen.

    Attributes
    ----------
    counts:
        ``trials``, ``killed_publishers``, ``killed_collectors``, ``killed_readers``, ``loads``, ``torn``, ``lost``,
        ``published``, ``removed``, ``restored``, and where publishers died: ``left_staging`` …
    problems:
        What must not be, in words.
    """

    def __init__(self, root: Path, *, seed: int, readers: int = 2) -> None:
        self._rng = random.Random(seed)
        self._store = HandoffStore(root / "weights")
        self._model = model_directory(root / "model")
        self._watch = ReaderWatch(self._store.root, expiry_s=EXPIRY_S)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        started = time.monotonic()
        self._attempt = 1
        writer = VersionCommitter.claim(self._store.root, self._attempt)
        for version in (1, 2, 3):
            publish(writer, version, self._model, words=WORDS)
        self._longest_s = max(0.015, PUBLICATIONS * (time.monotonic() - started) / 3)
        self._published = 3
        self._said = ""
        self._stop = root / "stop"
        self._root = root
        self._readers = [self._start_reader(i) for i in range(readers)]

    def close(self) -> None:
        """End the readers, and look at what they saw."""
        self._stop.touch()
        for reader in self._readers:
            self._end_reader(reader)
        shutil.rmtree(self._root, ignore_errors=True)

    def trial(self) -> None:
        """One trial."""
        rng, counts = self._rng, self.counts
        counts["trials"] += 1
        by_time = counts["trials"] % 4 == 0
        self._attempt += 1
        calls = [0 if by_time else rng.randint(1, CALLS) for _ in range(2)]
        publisher = fork_child(lambda say: self._publish(say, calls[0]))
        collector = fork_child(lambda say: self._collect(say, calls[1]))
        if by_time:
            kills = [(rng.uniform(0.0, self._longest_s), child) for child in (publisher, collector)]
            started = time.monotonic()
            for at, child in sorted(kills, key=lambda kill: kill[0]):
                child.kill_after(max(0.0, started + at - time.monotonic()))
        said = publisher.wait(), collector.wait()
        self._said = f"killed at calls {calls}, they said {[outcome.lines for outcome in said]}"
        counts["kills_by_time"] += 2 * by_time
        counts["killed_publishers"] += said[0].killed
        counts["killed_collectors"] += said[1].killed
        if said[0].failed or said[1].failed:
            self.problems.append(f"trial {counts['trials']}: a process failed by itself: {said}")
        for line in said[0].lines:
            self._published = max(self._published, int(line))
            counts["published"] += 1
        counts["removed"] += sum(len(line.split()) for line in said[1].lines)
        self._count_remains()
        self._recover()
        if self._readers and counts["trials"] % 50 == 0:
            self._replace_reader()

    # -- processes

    def _publish(self, say: Say, calls: int) -> None:
        """As a trainer that starts anew: claims, withdraws, and publishes."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if calls:
            die_at_call(calls)
        writer = VersionCommitter.claim(self._store.root, self._attempt)
        newest = self._store.newest() or 0
        writer.withdraw_after(newest)
        chain: tuple[int, ...] = ()
        for version in range(newest + 1, newest + 50):
            if 0 < len(chain) < CHAIN:
                publish_delta(writer, version, chain, self._model, words=WORDS)
            else:
                chain = ()
                publish(writer, version, self._model, words=WORDS)
            chain = (*chain, version)
            say(str(version))

    def _collect(self, say: Say, calls: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if calls:
            die_at_call(calls)
        collector = Collector(
            self._store, ReaderWatch(self._store.root, expiry_s=EXPIRY_S), keep_last=KEEP_LAST, settle_s=0.001
        )
        while True:
            report = collector.collect()
            if report.removed:
                say(" ".join(map(str, report.removed)))

    def _start_reader(self, number: int) -> Child:
        verify = number % 2 == 0  # one trusts names and renames alone, the other hashes

        def read(say: Say) -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            settings = ReaderSettings(expiry_s=EXPIRY_S, pace=Pace(20.0, 1 << 20), streams=1, verify=verify)
            with Subscriber(self._store.root, f"reader-{number}", settings) as subscriber:
                while not self._stop.exists():
                    try:
                        loaded = subscriber.load_newest(check_content)
                    except AssertionError as error:
                        say(f"torn {error}")
                        continue
                    except HandoffError as error:
                        say(f"nothing {error}")
                        continue
                    for skipped in loaded.skipped:
                        if "not there (any more)" not in skipped.reason:
                            say(f"damaged {skipped}")
                    subscriber.acknowledge(loaded.version)
                    say(f"loaded {loaded.version}")
                    time.sleep(0.015)

        return fork_child(read)

    def _replace_reader(self) -> None:
        number = self._rng.randrange(len(self._readers))
        self._readers[number].kill()
        self._end_reader(self._readers[number])
        self.counts["killed_readers"] += 1
        self._readers[number] = self._start_reader(number)

    def _end_reader(self, reader: Child) -> None:
        newest = 0
        outcome = reader.wait()
        if outcome.failed:
            self.problems.append("a reader failed by itself")
        for line in outcome.lines:
            what, _, rest = line.partition(" ")
            if what == "loaded":
                self.counts["loads"] += 1
                if int(rest) < newest:
                    self.problems.append(f"a reader went back from {newest} to {rest}")
                newest = int(rest)
            else:
                self.counts["torn"] += what == "torn"
                self.problems.append(line)

    # -- what must hold

    def _count_remains(self) -> None:
        """Where the killed were: what they left."""
        self.counts.update({f"left_{kind}": 1 for kind in {_kind(name) for name in self._hidden()}})

    def _hidden(self) -> list[str]:
        """What is neither a version nor of readers: half built, hidden, being removed."""
        root = self._store.root
        names = [name for name in os.listdir(root) if name.startswith((".hidden", ".removed"))]
        return names + [name for writer in root.glob(".writer-*") for name in os.listdir(writer)]

    def _recover(self) -> None:
        """The next publisher and collector: nothing that counted is lost, and nothing is left over."""
        store, trial = self._store, self.counts["trials"]
        self._attempt += 1
        VersionCommitter.claim(store.root, self._attempt).withdraw_after(store.newest() or 0)
        report = Collector(store, self._watch, keep_last=KEEP_LAST, settle_s=0.001).collect()
        self.counts["restored"] += len(report.restored)
        versions = store.versions()
        if not versions or versions[-1] < self._published:
            self.counts["lost"] += 1
            self.problems.append(f"trial {trial}: version {self._published} was published, there are {versions}")
        for version in versions:
            try:
                store.open(version).verify(content=True)
            except HandoffError as error:
                self.counts["torn"] += 1
                self.problems.append(f"trial {trial}: {error}")
        for record in self._watch.observe():
            if record.acknowledged is not None and record.acknowledged not in store.versions():
                self.counts["lost"] += 1
                self.problems.append(
                    f"trial {trial}: {record.reader} serves {record.acknowledged}, which is gone: {record}; there are "
                    f"{store.versions()}; of this pass {report}; of processes {self._said}"
                )
        if left := self._hidden():
            self.problems.append(f"trial {trial}: {left} are left over")
        self._published = max([self._published, *versions])


def _kind(name: str) -> str:
    """What a hidden name is."""
    if name.startswith("v"):
        return "staging"
    return name.lstrip(".").partition("-")[0]

"""What the trainer's client asks for, how long, and what it makes of each answer; with a clock of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hpcrl.dock.client import DockClient, _UnreachableError
from hpcrl.dock.columns import encode_columns
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.ledger.payload import PayloadWriter
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.interface import Location
from hpcrl.dock.warehouse.sharing import Sharing
from hpcrl.dock.wire import (
    BatchShard,
    BatchStats,
    MicroBatch,
    ReferencedShard,
    Sample,
    decode_answer,
    decode_shard,
    encode_shard,
)
from hpcrl.errors import DeadlineError, FencedError, PeerLostError
from hpcrl.network.credentials import Credentials

Answer = tuple[int, bytes] | None
EMPTY = BatchShard(step=3, rank=1, world_size=2, micro_batches=[], stats=BatchStats.of_tokens(8, sampled=5))


class Scripted(DockClient):
    """Gets the given answers, the last one for ever; None is a dock that cannot be reached. Each takes a second."""

    def __init__(self, answers: list[Answer], **options: Any) -> None:
        self.waits = 0
        super().__init__("http://dock:80", on_wait=self.waited, **{"wait_timeout_s": 10.0, **options})
        self.answers, self.asked, self.now_s = answers, list[str](), 100.0

    def waited(self) -> None:
        self.waits += 1

    def _once(self, method: str, path: str) -> tuple[int, bytes]:
        self.asked.append(f"{method} {path}")
        self.now_s += 1.0
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if answer is None:
            raise _UnreachableError("the dock cannot be reached")
        return answer


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    clients: list[Scripted] = []

    def make(answers: list[Answer], **options: Any) -> Scripted:
        clients.append(Scripted(answers, **options))
        return clients[-1]

    def sleep(seconds: float) -> None:
        assert seconds == 0.1
        clients[-1].now_s += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clients[-1].now_s if clients else 0.0)
    monkeypatch.setattr(time, "sleep", sleep)
    return make


def test_the_requests_of_each_call(scripted: Callable[..., Scripted]) -> None:
    client = scripted([(200, encode_shard(EMPTY)), (200, b""), (200, b""), (200, b"the state"), (204, b""), (200, b"")])
    assert client.batch(3, rank=1, world_size=2) == EMPTY
    client.trained(3)
    client.published(4)
    assert client.snapshot(5) == b"the state"
    client.finish(6)
    finish = "POST /dock/finish/6?wait_s=5.0"
    assert client.asked == [
        "GET /dock/batch/3?rank=1&world_size=2&wait_s=5.0",
        "POST /dock/trained/3",
        "POST /dock/published/4",
        "POST /dock/snapshot/5",
        finish,
        finish,
    ]
    assert client.waits == 1


@pytest.mark.parametrize("what", ["the batch of step 3", "the final evaluation of version 3"])
def test_what_is_not_ready_is_asked_for_until_the_deadline(scripted: Callable[..., Scripted], what: str) -> None:
    client = scripted([(204, b"")])
    ask = partial(client.batch, 3, rank=0, world_size=1) if "batch" in what else partial(client.finish, 3)
    with pytest.raises(DeadlineError, match=f"{what} did not come within 10 s from http://dock:80"):
        ask()
    assert (len(client.asked), client.waits) == (11, 11)


@pytest.mark.parametrize(
    ("reached", "wait_s", "connect_s", "seconds"), [(False, 10.0, 3.0, 10), (False, 2.0, 5.0, 5), (True, 10.0, 3.0, 3)]
)
def test_a_dock_that_does_not_answer_is_asked_again(
    scripted: Callable[..., Scripted], reached: bool, wait_s: float, connect_s: float, seconds: int
) -> None:
    """The first answer may take as long as engines take to start; one that was there has less time to come back."""
    client = scripted([(200, b""), None] if reached else [None], wait_timeout_s=wait_s, connect_timeout_s=connect_s)
    if reached:
        client.trained(0)
    began_s = client.now_s
    with pytest.raises(PeerLostError, match="the dock cannot be reached"):
        client.trained(1)
    assert seconds < client.now_s - began_s <= seconds + 2.2
    assert client.waits == len(client.asked) - reached - 1


def test_the_time_without_an_answer_counts_from_the_first_that_is_missing(scripted: Callable[..., Scripted]) -> None:
    """A server that holds requests is not gone, however long that has been."""
    client = scripted([(204, b"")] * 6 + [None] * 3 + [(200, encode_shard(EMPTY))], connect_timeout_s=4.0)
    assert client.batch(3, rank=1, world_size=2) == EMPTY


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (403, FencedError, "the orchestrator at http://dock:80 refuses this attempt: no\ufffd"),
        (401, PeerLostError, "orchestrator answered POST /dock/trained/1 with 401: no\ufffd"),
        (409, PeerLostError, "with 409: no\ufffd"),
        (410, PeerLostError, "with 410: no\ufffd"),
        (500, PeerLostError, "with 500: no\ufffd"),
        (206, PeerLostError, "with 206: no\ufffd"),
    ],
)
def test_other_answers_are_errors(
    scripted: Callable[..., Scripted], status: int, error: type[Exception], message: str
) -> None:
    client = scripted([(status, b" no\xff\n")])
    with pytest.raises(error, match=message.replace(".", r"\.")):
        client.trained(1)
    assert len(client.asked) == 1


def poll(client: DockClient, wanted_since_s: float | None, ended: threading.Event | None = None) -> BatchShard | None:
    return client.poll(3, rank=1, world_size=2, wanted_since_s=lambda: wanted_since_s, ended=ended or threading.Event())


def test_a_batch_that_is_asked_for_ahead_may_not_be_there(scripted: Callable[..., Scripted]) -> None:
    client = scripted([(204, b""), (200, encode_shard(EMPTY)), (410, b"stopping")])
    assert poll(client, None) is None
    assert poll(client, None) == EMPTY
    with pytest.raises(PeerLostError, match="with 410: stopping"):
        poll(client, None)
    assert set(client.asked) == {"GET /dock/batch/3?rank=1&world_size=2&wait_s=5.0&ahead=1"}
    assert client.waits == 0  # nobody waits


class Ended(threading.Event):
    """Set after so many pauses."""

    def __init__(self, client: Scripted, pauses: int) -> None:
        super().__init__()
        self.client, self.left = client, pauses

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == 0.1
        self.client.now_s += timeout
        self.left -= 1
        return self.left == 0


def test_a_rank_that_need_not_wait_retries_a_silent_dock_without_a_limit(scripted: Callable[..., Scripted]) -> None:
    client = scripted([None], connect_timeout_s=3.0)
    assert poll(client, None, Ended(client, 1000)) is None
    assert len(client.asked) == 1000


def test_a_silent_dock_is_lost_so_long_after_it_is_wanted(scripted: Callable[..., Scripted]) -> None:
    client = scripted([None], connect_timeout_s=30.0)
    with pytest.raises(PeerLostError):
        poll(client, 150.0, Ended(client, 1000))
    assert 180.0 < client.now_s <= 181.2


def test_a_url_names_a_host_and_a_port() -> None:
    for url in ("http://dock", "dock:80", "http://:80"):
        with pytest.raises(ValueError, match="needs a host and a port"):
            DockClient(url, wait_timeout_s=1.0)


# -- shards by reference


class Lab:
    """Three rollouts on disk, of which a warehouse of this node has some; and a shard that names them."""

    def __init__(self, path: Path, in_memory: int) -> None:
        for name in ("memory", "payload", "node"):
            (path / name).mkdir(mode=0o700)
        self.node, self.payload = path / "node", path / "payload"
        self.warehouse = EmbeddedWarehouse(path / "memory", limit_bytes=1 << 20)
        writer, samples = PayloadWriter(self.payload, 1), []
        for member in range(3):
            columns: dict[str, Any] = {
                "token_ids": np.full(4, member, dtype=np.int32),
                "sampled": np.ones(4, dtype=np.uint8),
                "logprobs": np.zeros(4, dtype=np.float32),
                "versions": np.zeros(4, dtype=np.int32),
            }
            block = encode_columns(b"", columns)
            place = writer.write([block])[0]
            if member < in_memory:
                assert self.warehouse.put(place, block)
            samples.append(Sample(5, member, 4, 1.0, place))
        self.shard = ReferencedShard(
            step=3,
            rank=1,
            world_size=2,
            micro_batches=[samples[:1], samples[1:]],
            stats=EMPTY.stats,
            location=Location(str(self.warehouse.directory)),
            payload_dir=str(self.payload),
        )


def tokens(shard: BatchShard) -> list[list[int]]:
    return [micro_batch.token_ids.tolist() for micro_batch in shard.micro_batches]


@pytest.mark.parametrize("in_memory", [3, 1, 0])
def test_columns_are_read_from_where_they_lie(
    in_memory: int, tmp_path: Path, scripted: Callable[..., Scripted], caplog: pytest.LogCaptureFixture
) -> None:
    lab, said = Lab(tmp_path, in_memory), list[tuple[int, int, str]]()
    answer = encode_shard(lab.shard)
    client = scripted([(200, answer)], on_disk=lambda *told: said.append(told))
    for _ in range(2):
        assert tokens(client.batch(3, rank=1, world_size=2)) == [[0] * 4, [1] * 4 + [2] * 4]
    wanted = {name: 2 * count for name, count in (("node", in_memory), ("disk", 3 - in_memory)) if count}
    assert dict(client.sources) == wanted
    lost = 3 - in_memory
    assert [(step, count) for step, count, _ in said] == ([(3, lost)] * 2 if lost else [])
    if lost:
        assert f"{lost} rollouts of step 3 are read from the shared filesystem, the first: " in caplog.text
        first = lab.shard.micro_batches[0][0] if in_memory == 0 else lab.shard.micro_batches[1][0]
        assert said[0][2].startswith(f"{first.place.file}.{first.place.offset}: ")
    else:
        assert caplog.text == ""


def test_a_run_without_a_warehouse_has_nothing_to_say(tmp_path: Path, scripted: Callable[..., Scripted]) -> None:
    lab, said = Lab(tmp_path, 0), list[tuple[int, int, str]]()
    shard = ReferencedShard(
        **{name: getattr(lab.shard, name) for name in lab.shard.__struct_fields__} | {"location": None}
    )
    client = scripted([(200, encode_shard(shard))], on_disk=lambda *told: said.append(told))
    client.batch(3, rank=1, world_size=2)
    assert said == [(3, 3, "")]


@pytest.mark.parametrize("room", [1 << 20, 1])
def test_ranks_of_a_node_share_what_comes_from_elsewhere(
    room: int, tmp_path: Path, scripted: Callable[..., Scripted], caplog: pytest.LogCaptureFixture
) -> None:
    lab = Lab(tmp_path, 3)
    lab.warehouse.close()  # it is on another node, which nobody serves
    client = scripted([(200, encode_shard(lab.shard))], sharing=Sharing(lab.node, limit_bytes=room))
    assert tokens(client.batch(3, rank=1, world_size=2)) == [[0] * 4, [1] * 4 + [2] * 4]
    blocks = list(lab.node.glob("*/000003/*.columns.*"))
    assert len(blocks) == (3 if room > 1 else 0)
    assert ("3 rollouts of step 3 are not shared with other ranks" in caplog.text) == (room == 1)
    client.close()
    assert list(lab.node.iterdir()) == []
    scripted([]).close()  # one that shares nothing has nothing to give back


def test_the_server_of_a_warehouse_is_shown_the_runs_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Reader:
        def __init__(self, location: Location, payload: Path, *, authorization: str) -> None:
            shown.append(authorization)
            raise OSError("seen")

    monkeypatch.setattr("hpcrl.dock.client.BlockReader", Reader)
    for credentials in (None, Credentials("t" * 64, 7)):
        client = DockClient("http://dock:80", credentials=credentials, wait_timeout_s=1.0)
        monkeypatch.setattr(
            client, "_once", lambda *_: (200, encode_shard(Lab(Path(tmp_path / str(len(shown))), 0).shard))
        )
        (tmp_path / str(len(shown))).mkdir()
        with pytest.raises(OSError, match="seen"):
            client.batch(3, rank=1, world_size=2)
    assert shown == ["", Credentials("t" * 64, 7).headers["Authorization"]]


# -- over HTTP


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, str]]]]:
    seen: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append({"": f"{self.command} {self.path}", **self.headers})
            self.send_response(200)
            self.send_header("content-length", "9")
            self.end_headers()
            self.wfile.write(b"the state")

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}", seen
        found.shutdown()
        thread.join()


def test_each_request_shows_who_asks(server: tuple[str, list[dict[str, str]]]) -> None:
    url, seen = server
    credentials = Credentials("t" * 64, 7)
    assert DockClient(url, credentials=credentials, wait_timeout_s=1.0).snapshot(3) == b"the state"
    assert DockClient(url, wait_timeout_s=1.0).snapshot(4) == b"the state"
    assert [each[""] for each in seen] == ["POST /dock/snapshot/3", "POST /dock/snapshot/4"]
    assert credentials.headers.items() <= seen[0].items()
    assert "Authorization" not in seen[1]


# -- on the wire


def test_what_is_known_without_an_orchestrator() -> None:
    stats = BatchStats.of_tokens(8, sampled=5)
    assert (stats.total_tokens, stats.total_sampled_tokens) == (8, 5)
    assert (BatchStats.of_tokens().total_tokens, BatchStats.of_tokens().total_sampled_tokens) == (0, 0)
    means = (stats.reward_mean, stats.reward_std, stats.staleness_mean, stats.staleness_max, stats.reward_count)
    assert means == (0.0, 0.0, 0.0, 0, 0)
    assert stats.rollouts == stats.reward_by_env == stats.reward_parts == stats.staleness_histogram == {}


def test_a_shard_with_columns_comes_back() -> None:
    micro_batch = MicroBatch(
        token_ids=np.arange(6, dtype=np.int32)[::2],
        cu_seqlens=np.asarray([0, 3], dtype=np.int32),
        loss_mask=np.ones(3, dtype=np.uint8),
        logprobs=np.asarray([0.0, -1.5, -2.5], dtype=np.float32),
        versions=np.asarray([4, 5, 6], dtype=np.int32),
        advantages=np.zeros(3, dtype=np.float32),
        rollouts=[(9, 1)],
    )
    data = encode_shard(
        BatchShard(step=3, rank=1, world_size=2, micro_batches=[micro_batch], stats=BatchStats.of_tokens(3))
    )
    found = decode_shard(data)
    (back,) = found.micro_batches
    for name in ("token_ids", "cu_seqlens", "loss_mask", "logprobs", "versions", "advantages"):
        ours, theirs = getattr(micro_batch, name), getattr(back, name)
        assert (theirs.dtype, theirs.tolist()) == (ours.dtype, ours.tolist())
        assert not theirs.flags.writeable
    assert (back.rollouts, back.routed_experts) == ([(9, 1)], None)


@pytest.mark.parametrize(
    "value", [{}, {"dtype": "|O", "shape": [1], "data": b"x"}, {"dtype": "<i4", "shape": [2], "data": b"1234"}, 7]
)
def test_an_array_that_is_none_is_refused(value: object) -> None:

    whole = msgspec.msgpack.decode(encode_shard(EMPTY))
    arrays = dict.fromkeys(("token_ids", "cu_seqlens", "loss_mask", "logprobs", "versions", "advantages"), value)
    whole["micro_batches"] = [arrays]
    with pytest.raises(ValueError, match=r"not a batch shard|an array cannot be read|cannot reshape|buffer"):
        decode_shard(msgspec.msgpack.encode(whole))


def test_places_are_read_back_as_they_were_sent() -> None:
    place = PayloadPlace("000001-000001.columns", 4096, 77, "ab" * 16)
    shard = ReferencedShard(
        step=3,
        rank=1,
        world_size=2,
        micro_batches=[[Sample(5, 1, 4, -0.25, place, counts_as=2)], []],
        stats=EMPTY.stats,
        location=Location("/dev/shm/x", "node", 80),
        payload_dir="/runs/r",
    )

    assert decode_answer(encode_shard(shard)) == shard


def test_places_that_cannot_be_read_are_no_shard() -> None:
    place = PayloadPlace("000001-000001.columns", 4096, 77, "ab" * 16)
    shard = ReferencedShard(
        step=3,
        rank=1,
        world_size=2,
        micro_batches=[[Sample(5, 1, 4, -0.25, place, counts_as=2)]],
        stats=EMPTY.stats,
        location=Location("/dev/shm/x", "node", 80),
        payload_dir="/runs/r",
    )
    damaged = msgspec.msgpack.decode(encode_shard(shard))
    damaged["location"] = 7
    with pytest.raises(ValueError, match=r"not a batch shard: .*\$\.location"):
        decode_answer(msgspec.msgpack.encode(damaged))

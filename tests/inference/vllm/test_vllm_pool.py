"""Two real vLLM engines on one real Mooncake Store, started by the commands of a plan."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_helpers import Server, decode_experts, forward, logprob_error, publish, random_model, tensors_of
from vllm_fleet import Fleet, generate

from hpcrl.config.plan import Role
from hpcrl.inference.vllm.fetches import TRIES
from hpcrl.modeling.decoder import Decoder
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.sampling.known_rows import KnownRows
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsRows, RoutedExpertsSettings
from hpcrl.weights import HandoffStore

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2400)]

NAME = "quickstart_vllm"
TOLERANCE = 2e-3
BLOCK = 32
ROWS = RoutedExpertsSettings(layers=2, width=2, experts=8, gaps=True)
"""Of the model that `tiny` is."""
SETTINGS = (
    "engine.replicas=2",
    "engine.kv_store={segment_gib: 0.125, local_buffer_gib: 0.0625}",
    "engine.return_routed_experts=true",
)


LOSE = """
import os, pathlib
try:
    from mooncake.store import MooncakeDistributedStore as store
except ImportError:
    pass
else:
    fetch = store.batch_get_into_multi_buffers
    def lose(self, keys, *rest):
        now = pathlib.Path(os.environ["LOSE"])
        if now.exists():
            with now.with_name("lost").open("a") as log:
                log.write("x")
            if not now.read_text():
                now.unlink()
            return [-800] * len(keys)
        return fetch(self, keys, *rest)
    store.batch_get_into_multi_buffers = lose
"""
"""Runs as ``sitecustomize`` in engines: where a file is, Mooncake's client removes it and says that it could not
transfer, as it does when the lease of a block ends meanwhile. A file that is not empty stays, and so does the trouble.
All else is real."""


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is put, the next fetch from the pool fails."""
    return tmp_path_factory.mktemp("lose") / "now"


@pytest.fixture(scope="module")
def engines(tiny: tuple[Path, Decoder], lost: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    (lost.parent / "sitecustomize.py").write_text(LOSE)
    fleet = Fleet(tmp_path_factory.mktemp("pool") / "run", tiny, *SETTINGS)
    try:
        fleet.start(Role.STORE, timeout_s=120.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(lost.parent))
            patch.setenv("LOSE", str(lost))
            started = fleet.start(Role.ENGINE)
        yield started
    finally:
        fleet.stop()


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(7, 103) for _ in range(length)]


class Ask:
    """A request, and how many of its prompt's tokens came from where.

    Attributes
    ----------
    own, pool:
        Tokens that the engine found in its own cache, and in the pool.
    """

    def __init__(self, engine: Server, prompt: list[int], *, salt: str) -> None:
        before = engine.metrics()
        sampling = {"routed_experts_prompt_start": 0}
        self.prompt, self.choice = prompt, generate(engine, NAME, prompt, cache_salt=salt, sampling=sampling)
        after = engine.metrics()

        def risen(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        self.own, self.pool = (
            risen("vllm:prefix_cache_hits_total"),
            risen("vllm:external_prefix_cache_hits_total"),
        )

    def error(self, model: Decoder) -> float:
        logprobs = [entry["logprob"] for entry in self.choice["logprobs"]["content"]]
        return logprob_error(model, self.prompt, self.choice["token_ids"], logprobs)

    def check_experts(self, model: Decoder, store: KnownRows, *, unknown: float) -> None:
        """Rows that the engine knows are the model's, and so are those that another rollout brought; none is missing.

        Parameters
        ----------
        unknown:
            Tokens that came from the pool: the engine has no rows of them.
        """
        experts = decode_experts(self.choice["routed_experts"])
        sequence = [*self.prompt, *self.choice["token_ids"]]
        assert len(experts) == len(sequence) - 1
        rows = RoutedExpertsRows(ROWS, store)
        before = store.counters.as_dict()
        rows.add(len(experts), experts, opening=(1, self.prompt))
        routes = rows.aligned(len(sequence))
        assert routes is not None
        assert routes.known.tolist() == [True] * len(experts) + [False]
        assert (routes.experts[:-1] == forward(model, sequence)[1][:-1]).all()
        risen = {name: value - before[name] for name, value in store.counters.as_dict().items()}
        assert (risen["rows_shared_prefix"], risen["rows_unknown"]) == (unknown, 0)
        assert risen["rows_answer"] == len(experts) - unknown


@pytest.mark.parametrize("length", [300, 320])
def test_a_prefix_of_one_engine_is_read_by_the_other(
    engines: list[Server], tiny: tuple[Path, Decoder], length: int
) -> None:
    """From the pool, by the other's own counters, and it is the right one: log-probabilities are the model's.

    So are experts. Of what it read an engine has none; they are those of the answer that computed it. A prompt of whole
    blocks comes from the pool but for its last token, in the middle of a block.
    """
    one, two = engines
    asked: list[tuple[Ask, Ask]] = []

    def found() -> bool:
        # blocks are put behind the answer, and what an engine has computed itself it asks nobody for: each time another
        # prompt, and more time
        prompt = prompt_of(length, 100 + length + len(asked))
        first = Ask(one, prompt, salt="1")
        assert (first.own, first.pool) == (0, 0)
        time.sleep(0.2 * 2 ** min(5, len(asked)))
        asked.append((first, Ask(two, prompt, salt="1")))
        return asked[-1][1].pool > 0

    two.wait_for(found, "a prefix from the pool", timeout_s=120.0)
    first, read = asked[-1]
    assert read.pool >= length // BLOCK * BLOCK - BLOCK
    again = Ask(two, read.prompt, salt="1")
    store = KnownRows(Counters(), block=BLOCK, limit_bytes=1 << 30, keep_versions=1)
    # a fetch that failed and was tried again is counted twice by the engine
    fetched = min(read.pool, length // BLOCK * BLOCK, length - 1)
    for each, unknown in ((first, 0), (read, fetched), (again, fetched)):
        assert each.error(tiny[1]) < TOLERANCE
        each.check_experts(tiny[1], store, unknown=unknown)
    assert read.choice["token_ids"] == first.choice["token_ids"]


def test_a_request_outlives_a_fetch_that_fails(engines: list[Server], tiny: tuple[Path, Decoder], lost: Path) -> None:
    """The engine looks again, and computes what is no longer found; vLLM's default would be status 500."""
    one, two = engines
    log = two.log.read_text()

    def found() -> bool:
        prompt = prompt_of(300, random.randrange(1 << 30))
        lost.unlink(missing_ok=True)
        Ask(one, prompt, salt="lost")
        time.sleep(3.0)  # blocks are put behind the answer
        lost.touch()
        asked = Ask(two, prompt, salt="lost")
        assert asked.error(tiny[1]) < TOLERANCE
        sequence = [*prompt, *asked.choice["token_ids"]]
        experts = decode_experts(asked.choice["routed_experts"])
        known = experts.any((1, 2))
        assert known[len(prompt) - 1 :].all()
        assert (experts == forward(tiny[1], sequence)[1][:-1])[known].all()
        return "Recovered from KV load failure" in two.log.read_text().removeprefix(log)

    try:
        two.wait_for(found, "a prefix that is found and not fetched", timeout_s=120.0)
    finally:
        lost.unlink(missing_ok=True)


def test_a_fetch_that_continues_failing_is_given_up(
    engines: list[Server], tiny: tuple[Path, Decoder], lost: Path
) -> None:
    """The pool says each time that it has the prompt. The engine tries twice and computes it; without a limit it would
    try until the request's deadline."""
    one, two = engines
    log, tries = two.log.read_text(), lost.with_name("lost")

    def found() -> bool:
        prompt = prompt_of(300, random.randrange(1 << 30))
        lost.unlink(missing_ok=True)
        Ask(one, prompt, salt="gone")
        time.sleep(3.0)  # blocks are put behind the answer
        tries.write_text("")
        lost.write_text("for good")
        asked = Ask(two, prompt, salt="gone")
        assert asked.error(tiny[1]) < TOLERANCE
        experts = decode_experts(asked.choice["routed_experts"])
        if not tries.read_text():
            return False
        # it has computed all, so it knows all rows
        assert (experts == forward(tiny[1], [*prompt, *asked.choice["token_ids"]])[1][:-1]).all()
        return True

    two.timeout_s, before = 60.0, two.timeout_s
    try:
        two.wait_for(found, "a prefix that is found and never fetched", timeout_s=120.0)
    finally:
        two.timeout_s = before
        lost.unlink(missing_ok=True)
    assert len(tries.read_text()) == TRIES
    assert f"could not be fetched {TRIES} times: it is computed" in two.log.read_text().removeprefix(log)


def test_a_prefix_of_another_salt_is_not(engines: list[Server], tiny: tuple[Path, Decoder]) -> None:
    """What another version computed is in neither cache."""
    one, two = engines
    prompt = prompt_of(300, 11)
    Ask(one, prompt, salt="1")
    for engine in (one, two):
        asked = Ask(engine, prompt, salt="other")
        assert asked.own == 0
        assert asked.error(tiny[1]) < TOLERANCE
    assert Ask(one, prompt, salt="third").pool == 0


def test_after_an_update_no_new_request_meets_old_kv(engines: list[Server], tiny: tuple[Path, Decoder]) -> None:
    """The pool holds the prompt's old KV, and so does each engine; under the new salt both compute it anew.

    The control: under the old salt the old KV is found, and the log-probabilities are of neither version.
    """
    prompt = prompt_of(300, 21)
    for engine in engines:
        Ask(engine, prompt, salt="1")
    new = random_model(tiny[1].arch, seed=31)
    path = publish(HandoffStore(engines[0].log.parent / "weights"), 2, tiny[0], tensors_of(new)).path
    for engine in engines:
        engine.ok("/init_weight_transfer_engine", {"init_info": {}})
        engine.ok("/start_weight_update", {})
        engine.ok("/pause?mode=keep&clear_cache=false")
        engine.ok("/update_weights", {"update_info": {"path": str(path)}})
        engine.ok("/finish_weight_update", {"weight_version": "2"})
        engine.ok("/resume")
        # a module that computes its tensors itself was not "not loaded"
        assert "Failed to load weights" not in engine.log.read_text()
    fresh = [Ask(engine, prompt, salt="2") for engine in engines]
    assert fresh[0].own == fresh[0].pool == 0
    for asked in fresh:
        assert asked.error(new) < TOLERANCE
        assert {span["version"] for span in asked.choice["weight_versions"]} == {"2"}
    mixed = Ask(engines[0], prompt, salt="1")
    assert mixed.own > 0
    assert mixed.error(new) > 10 * TOLERANCE
    assert mixed.error(tiny[1]) > 10 * TOLERANCE

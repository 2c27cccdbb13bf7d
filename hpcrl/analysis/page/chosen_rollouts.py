"""Rollouts that a page shows: of each environment the worst, the median and the best of the newest steps."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.analysis.finished_rollouts import FinishedRollouts
from hpcrl.analysis.spoken_turns import turns_in_pieces
from hpcrl.dock.ledger.replay import Held
from hpcrl.dock.sequences import turn_places
from hpcrl.runs.lenient import finite
from hpcrl.runs.outlets.samples import shortened
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sharing.secret_scan import SecretScan
from hpcrl.runs.token_ratios import RolloutRatios, read_ratios, tokens_digest
from hpcrl.runs.views.rollouts import ConsumedLines, rollout_details

NEWEST_STEPS = 10
"""Number of newest steps of which rollouts are chosen."""
MOST_ENVIRONMENTS = 4
ALL_BYTES = 1_500_000
"""Maximum size of the turns of all rollouts of a page, as JSON."""
_LEVELS = ((20_000, 4000, 400), (6000, 1000, 200), (2000, 300, 100), (800, 100, 40), (300, 30, 12), (100, 8, 4))
"""Maximum characters of a text, tokens of a turn, and turns of a rollout: the first that fit are taken."""
_LONGEST_CHARACTER = 8
"""Maximum tokens that one character takes."""


def choose_shown(finished: FinishedRollouts, recorded: Collection[tuple[int, int, int]] = ()) -> list[tuple[str, Held]]:
    """Return names (``worst``, ``median``, ``best``) and rollouts, of each of the first environments.

    They are of the newest steps, because these show what the policy does now.

    Parameters
    ----------
    recorded:
        Step, group and member of rollouts that have log-ratios (see `recorded_rollouts`). They are preferred among
        rollouts of equal reward. Where no chosen one has them, the newest that has is added as ``with mismatch``.
    """
    newest = [held for step in list(finished.trained)[-NEWEST_STEPS:] for held in finished.trained[step]]
    chosen = []
    for name in sorted({held.entry.environment for held in newest})[:MOST_ENVIRONMENTS]:
        own = [held for held in newest if held.entry.environment == name and _reward(held) is not None]
        # of equal rewards the newest is last
        own.sort(key=lambda held: (_reward(held) or 0.0, held.step or 0, held.id))
        places = {"worst": 0, "median": len(own) // 2, "best": len(own) - 1} if own else {}
        with_ratios = [held for held in own if _key(held) in recorded]
        added = [(word, _preferred(with_ratios, own[place])) for word, place in places.items()]
        if with_ratios and not any(_key(held) in recorded for _, held in added):
            added.append(("with mismatch", max(with_ratios, key=_key)))
        chosen += added
    return chosen


def recorded_rollouts(run: RunDir, finished: FinishedRollouts) -> set[tuple[int, int, int]]:
    """Return step, group and member of the newest rollouts with log-ratios whose tokens are still kept."""
    ratios, payload = read_ratios(run), run.rollouts_dir / "payload"
    newest = [held for step in list(finished.trained)[-NEWEST_STEPS:] for held in finished.trained[step]]
    return {_key(held) for held in newest if _key(held) in ratios and (payload / held.entry.payload.file).is_file()}


def _preferred(with_ratios: Sequence[Held], wanted: Held) -> Held:
    """Return the newest rollout with log-ratios and the reward of the wanted one; else the wanted one."""
    same = [held for held in with_ratios if _reward(held) == _reward(wanted)]
    return same[-1] if same else wanted


def _key(held: Held) -> tuple[int, int, int]:
    return (-1 if held.step is None else held.step, *held.id)


def _reward(held: Held) -> float | None:
    reward = held.entry.reward
    return reward if reward is not None and math.isfinite(reward) else None


def shown_rollouts(run: RunDir, finished: FinishedRollouts, runs: int = 1) -> list[dict[str, Any]]:
    """Return the chosen rollouts as plain values: facts, and turns with their texts and tokens where these are kept.

    Parameters
    ----------
    runs:
        Number of runs of the page, which share its size.
    """
    chosen = choose_shown(finished, recorded_rollouts(run, finished))
    return rollout_documents(run, chosen, ALL_BYTES // max(1, runs * len(chosen)))


def rollout_documents(run: RunDir, shown: Sequence[tuple[str, Held]], most_bytes: int) -> list[dict[str, Any]]:
    """Return rollouts as plain values, each with its name; secrets in their texts are replaced.

    Parameters
    ----------
    most_bytes:
        Maximum size of the turns of one of them, as JSON.
    """
    consumed = ConsumedLines(run)
    chosen = [(word, rollout_details(run, held, consumed)) for word, held in shown]
    places = [
        list(turn_places(details["turns"], details["columns"].get("starts"))) if "columns" in details else []
        for _, details in chosen
    ]
    ids = [details["columns"]["token_ids"].tolist() if "columns" in details else [] for _, details in chosen]
    # all turns in one request: the interpreter of the orchestrator is started once
    asked = [
        (tokens[at.said : at.sampled], tokens[at.sampled : at.end])
        for tokens, own in zip(ids, places, strict=True)
        for at in own
    ]
    spoken = iter(turns_in_pieces(run, asked) if asked else [])
    decode, recorded, scan = _decoder(run), read_ratios(run), SecretScan.of_run(run)
    documents = []
    for (word, details), (_, held), own, tokens in zip(chosen, shown, places, ids, strict=True):
        turns = []
        ratios = _ratios_of_tokens(details.get("columns"), recorded.get(_key(held)))
        for at, turn in zip(own, details["turns"], strict=True):
            said, sampled = next(spoken)
            columns = details["columns"]
            turns.append(
                {
                    "said": _without_secrets(scan, said),
                    "sampled": _without_secrets(scan, sampled),
                    "wait_s": round(float(turn[2]), 3),
                    "seconds": round(float(turn[3]), 3),
                    "tokens": _tokens_without_secrets(
                        scan,
                        _tokens(
                            decode,
                            tokens[at.sampled : at.end],
                            columns["logprobs"][at.sampled : at.end].tolist(),
                            columns["versions"][at.sampled : at.end].tolist(),
                            ratios[at.sampled : at.end],
                        ),
                    ),
                    "count": at.end - at.sampled,
                }
            )
        documents.append(scan.cleaned(_document(word, details, turns)) | {"mismatch": bool(ratios)})
    return [fitted_rollout(document, most_bytes) for document in documents]


def _without_secrets(scan: SecretScan, pieces: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    texts = scan.cleaned_parts([text for _, text in pieces])
    return [(kind, text) for (kind, _), text in zip(pieces, texts, strict=True)]


def _tokens_without_secrets(scan: SecretScan, entries: list[list[Any]]) -> list[list[Any]]:
    """Return tokens; of those of a secret the first is ``[secret]``, and the others are empty."""
    texts = scan.cleaned_parts([entry[0] for entry in entries])
    return [[text, *entry[1:]] for text, entry in zip(texts, entries, strict=True)]


def fitted_rollout(document: dict[str, Any], most_bytes: int) -> dict[str, Any]:
    """Return a rollout whose turns fit into a size: the middles of texts, tokens and turns are left out."""
    fitted = document
    for text, tokens, turns in _LEVELS:
        kept, left_out = _ends(document["turns"], turns)
        cut = [
            {
                **turn,
                "said": _cut(turn["said"], text),
                "sampled": _cut(turn["sampled"], text),
                "tokens": _ends(turn["tokens"], tokens)[0],
                "left_out": _ends(turn["tokens"], tokens)[1],
            }
            for turn in kept
        ]
        whole = {"turns": cut, "turns_left_out": left_out, "text": shortened(document["text"], text)}
        fitted = {**document, **whole}
        if len(json.dumps(whole)) <= most_bytes:
            break
    return fitted


def _ends(values: Sequence[Any], most: int) -> tuple[list[Any], int]:
    """Return the first and the last of values, and the number of those between them that are left out."""
    if len(values) <= most:
        return list(values), 0
    half = most // 2
    return [*values[:half], *values[len(values) - half :]], len(values) - 2 * half


def _document(word: str, details: dict[str, Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
    names: tuple[str, ...] = (
        "id",
        "environment",
        "prompt_index",
        "reward",
        "parts",
        "advantage",
        "tokens",
        "sampled_tokens",
    )
    names += ("first_version", "last_version", "staleness", "step", "seconds", "branches", "problem")
    facts = {name: details[name] for name in names if details.get(name) not in (None, "", {})}
    text = "" if turns else str(details.get("text", ""))
    document: dict[str, Any] = finite({"rank": word, "facts": facts, "turns": turns, "text": text})
    return document


def _cut(pieces: Sequence[tuple[str, str]], most: int) -> list[list[str]]:
    return [[kind, shortened(text, most)] for kind, text in pieces]


def _decoder(run: RunDir) -> Any:
    """Return what makes text of tokens; None where the tokenizer of the run's model is not here."""
    try:
        from hpcrl.models.tokenizer import ChatTokenizer  # noqa: PLC0415 - needs an extra

        tokenizer = ChatTokenizer(Path(run.recipe().model.path))
    except Exception:  # noqa: BLE001 - the tokenizers package raises bare exceptions; tokens are numbers without it
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _ratios_of_tokens(columns: Mapping[str, Any] | None, recorded: RolloutRatios | None) -> list[float | None]:
    """Return the log-ratio of each token of a rollout; an empty list where the record is of other tokens."""
    if columns is None or recorded is None:
        return []
    sampled = columns["sampled"] != 0
    own = columns["token_ids"][sampled]
    if len(own) != len(recorded.log_ratios) or tokens_digest(own) != recorded.digest:
        return []
    values = iter(recorded.log_ratios)
    return [next(values) if each else None for each in sampled.tolist()]


class _Token(NamedTuple):
    """A sampled token: its id, the engine's log-probability, the version that sampled it, and its log-ratio."""

    id: int
    logprob: float
    version: int
    ratio: float | None


def _tokens(
    decode: Any,
    ids: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int],
    ratios: Sequence[float | None],
) -> list[list[Any]]:
    """Return text, log-probability and version of tokens, and their log-ratios where these are known.

    Tokens that are parts of one character are one entry, with the sums of their log-probabilities and log-ratios. Those
    of a turn that is longer than a page shows are its ends.
    """
    kept, _ = _ends(range(len(ids)), _LEVELS[0][1])
    tokens = [_Token(ids[i], logprobs[i], versions[i], ratios[i] if ratios else None) for i in kept]
    return list(_entries(decode, tokens))


def _entries(decode: Any, tokens: Sequence[_Token]) -> Iterator[list[Any]]:
    begin, before = 0, list[int]()
    for end in range(1, len(tokens) + 1):
        part = tokens[begin:end]
        own = [token.id for token in part]
        text = f" {own[0]}" if decode is None else _text_after(decode, before, own)
        if text.endswith("\ufffd") and end < len(tokens) and len(part) < _LONGEST_CHARACTER:
            continue
        logprob = sum(token.logprob for token in part)
        ratios = [token.ratio for token in part if token.ratio is not None]
        entry = [text, round(logprob, 4) if math.isfinite(logprob) else None, part[-1].version]
        yield [*entry, round(sum(ratios), 5)] if len(ratios) == len(part) else entry
        begin, before = end, own


def _text_after(decode: Any, before: list[int], own: list[int]) -> str:
    """Return the text of tokens behind others: some decoders take a space from the front of what they are given."""
    head, whole = decode(before), decode(before + own)
    return str(whole[len(head) :] if whole.startswith(head) else decode(own))

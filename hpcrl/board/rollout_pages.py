"""Rollouts of a run: a list with filters, and one rollout with its turns, as text by kind or as coloured tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from markupsafe import Markup

from hpcrl.analysis.finished_rollouts import trained_rollouts
from hpcrl.analysis.page.chosen_rollouts import ALL_BYTES, choose_shown, recorded_rollouts, rollout_documents
from hpcrl.analysis.page.page_values import script_json
from hpcrl.board.board_state import MOST_LEDGER_BYTES, Board, BoardAnswer, clock, view_stamp
from hpcrl.board.file_stamps import ledger_stamp
from hpcrl.board.run_page import run_head
from hpcrl.dock.ledger.entries import ledger_bytes
from hpcrl.dock.ledger.replay import Replay, State
from hpcrl.errors import UsageError
from hpcrl.runs.observe import observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.rollouts import choose_rollouts, find_rollout, read_ledger, rollout_items
from hpcrl.runs.views.words import number

_PAGE = 100
"""Rollouts of a page of the list."""


def rollouts_page(board: Board, key: str, run: RunDir, query: Mapping[str, str], seen: str) -> BoardAnswer:
    """Return the finished rollouts that match, newest first.

    Raises
    ------
    UsageError
        There is no ledger, it is too large, or a filter names what does not exist.
    """
    view = observe(run)
    tag = board.tag("rollouts", key, view_stamp(view), ledger_stamp(run), str(sorted(query.items())))
    if tag == seen:
        return BoardAnswer(None, tag)
    replay = _replay(board, run)
    wanted = {name: query.get(name, "")[:200] for name in ("environment", "state", "step", "page")}
    step, page = _whole(wanted["step"], "step"), _whole(wanted["page"], "page") or 0
    chosen = choose_rollouts(
        replay, environment=wanted["environment"] or None, state=wanted["state"] or None, step=step
    )
    newest = chosen[::-1]
    shown = rollout_items(newest[page * _PAGE : (page + 1) * _PAGE])
    everything = replay.rollouts
    trained = trained_rollouts(everything)
    words: dict[str, Any] = {"title": f"{view.name} · rollouts", "key": key, "run": run_head(view), "place": "rollouts"}
    return board.render(
        "rollouts.html.j2",
        tag,
        of=[run],
        **words,
        rows=[
            {
                "item": msgspec.to_builtins(item),
                "reward": number(item.reward),
                "ended": clock(item.ended_s),
                "path": item.id,
            }
            for item in shown
        ],
        total=len(chosen),
        everything=len(everything),
        environments=sorted({held.entry.environment for held in everything}),
        states=[state.value for state in State],
        wanted=wanted,
        page=page,
        pages=(len(chosen) + _PAGE - 1) // _PAGE,
        chosen=[
            {
                "word": word,
                "environment": held.entry.environment,
                "id": f"{held.entry.group}/{held.entry.member}",
                "reward": number(held.entry.reward),
            }
            for word, held in choose_shown(trained, recorded_rollouts(run, trained))
        ],
    )


def rollout_page(board: Board, key: str, run: RunDir, name: str, seen: str) -> BoardAnswer:
    """Return one rollout, ``GROUP/MEMBER`` (errors: `rollouts_page`)."""
    view = observe(run)
    tag = board.tag("rollout", key, name, view_stamp(view), ledger_stamp(run))
    if tag == seen:
        return BoardAnswer(None, tag)
    held = find_rollout(_replay(board, run), name)
    (document,) = rollout_documents(run, [("", held)], ALL_BYTES)
    data = {
        "runs": [{"name": view.name, "marks": [], "rollouts": [document]}],
        "plots": [],
        "timelines": [],
    }
    facts = [(fact, json.dumps(value, ensure_ascii=False)) for fact, value in document["facts"].items()]
    words: dict[str, Any] = {
        "title": f"{view.name} · rollout {name}",
        "key": key,
        "run": run_head(view),
        "place": "rollouts",
    }
    return board.render(
        "rollout.html.j2",
        tag,
        of=[run],
        **words,
        id=name,
        facts=facts,
        data=Markup(script_json(data)),
        own=run.is_own,
        with_mismatch=document["mismatch"],
    )


def _replay(board: Board, run: RunDir) -> Replay:
    size = ledger_bytes(run.rollouts_dir / "ledger")
    if size > MOST_LEDGER_BYTES:
        raise UsageError(
            f"the ledger of {run.name} has {size >> 20:,} MiB, more than a board keeps in memory\n"
            f"    hint: hpcrl rollouts ls {run.name} and hpcrl rollouts show {run.name} GROUP/MEMBER read it"
        )
    return board.ledgers.get(run.path, ledger_stamp(run), lambda: read_ledger(run))


def _whole(text: str, name: str) -> int | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{text[:40]!r} is not the number of a {name}")
    return int(text)

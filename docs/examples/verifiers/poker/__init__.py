"""Several turns: one hand of Kuhn poker against an opponent that plays by a rule. The hands have no end."""

import random
import re
from collections.abc import Iterator
from itertools import count

import verifiers.v1 as vf

__all__ = ["PokerEnv", "PokerTaskset"]

CARDS = "JQK"
MOVES = {"": ("check", "bet"), "check-bet": ("fold", "call")}


class HandData(vf.TaskData):
    cards: str


class HandTask(vf.Task[HandData]):
    pass


class PokerTaskset(vf.Taskset[HandTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[HandTask]:
        for hand in count():
            cards = "".join(random.Random(hand).sample(CARDS, 2))
            yield HandTask(HandData(name=f"hand {hand}", cards=cards))


class PokerConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


def opponent(card: str, history: str) -> str:
    """Bet with a king; call with anything but a jack."""
    if history == "check":
        return "bet" if card == "K" else "check"
    return "fold" if card == "J" else "call"


def payoff(history: str, cards: str) -> float:
    if history.endswith("fold"):
        return -1.0 if history == "check-bet-fold" else 1.0
    won = 1.0 if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -1.0
    return won * (2.0 if history.endswith("call") else 1.0)


class PokerEnv(vf.Env[PokerConfig]):
    async def run(self, task: HandTask, agents: vf.Agents) -> None:
        cards, history, legal = task.data.cards, "", True
        seat = vf.Task(vf.TaskData(idx=task.data.idx, system_prompt=f"You play Kuhn poker. Your card is {cards[0]}."))
        async with agents.player.interaction(seat) as player:
            while history in MOVES and legal:
                told = f"So far: {history or 'nothing'}. Say [{MOVES[history][0]}] or [{MOVES[history][1]}]."
                segment = await player.turn(told)
                said = [move for move in re.findall(r"\[(\w+)\]", segment.last_reply) if move in MOVES[history]]
                legal = len(said) == 1
                history = "-".join(filter(None, [history, said[0] if legal else ""]))
                if history in ("check", "bet"):
                    history += f"-{opponent(cards[1], history)}"
        player.trace.record_reward("payoff", payoff(history, cards) if legal else -1.0)
        player.trace.record_metric("legal", float(legal))

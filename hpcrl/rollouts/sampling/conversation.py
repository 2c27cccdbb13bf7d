"""One conversation with the policy: exact ids in and out.

Messages of an environment are rendered and appended; tokens that the engine sampled are appended as they came, with
log-probabilities and versions. If the chat template leaves earlier thinking out, and the recipe lets it, the next
prompt is rendered whole and begins a branch. The sequences that are trained on are therefore those that the engine saw,
token by token.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.rollouts.core.records import Rollout
from hpcrl.rollouts.core.saved_turns import TurnKeeper
from hpcrl.rollouts.engines.rows import beside_loop
from hpcrl.rollouts.engines.sessions import EngineSession
from hpcrl.rollouts.environments import Message, Outcome, PolicyEndpoint, Reply, Tool
from hpcrl.rollouts.rendering import Parsed
from hpcrl.rollouts.sampling.sampler import RecordedTurns, Sampler
from hpcrl.rollouts.sampling.turn_sampler import TurnSampler

__all__ = ["Conversation", "Sampler"]


class _Prompt(NamedTuple):
    """Tokens of messages, and where they belong: behind the ``before`` tokens of the sequence, or into a new one."""

    token_ids: NDArray[np.int32]
    before: int
    begins: bool = False
    anew: bool = False
    thought: bool = False
    ended_otherwise: int = 0

    @property
    def length(self) -> int:
        """Return how many tokens the conversation has with them."""
        return self.before + len(self.token_ids)


class Conversation:
    """Conversation with the policy; an `hpcrl.rollouts.environments.Policy`.

    Attributes
    ----------
    seed:
        Seed of this rollout; each turn samples with a seed of its own, derived from it.
    declared_branches:
        How often its environment let the conversation begin anew.
    """

    def __init__(
        self,
        sampler: Sampler,
        session: EngineSession,
        *,
        seed: int,
        opening: list[int] | None = None,
        tools: Sequence[Tool] = (),
        keeper: TurnKeeper | None = None,
    ) -> None:
        """Initialise; nothing is sent.

        Parameters
        ----------
        session:
            Session of the group.
        opening:
            Token ids of the prompt, where the caller has rendered it already.
        tools:
            Tools that the policy may call.
        keeper:
            Has the turns from before an interruption, and records those that end. None: turns are not saved.
        """
        self.seed, self._sampler, self._opening = seed, sampler, opening
        self._turns = TurnSampler(sampler, session, seed=seed, keeper=keeper)
        self._branches = self._turns.branches
        self._tools, self._parsed, self._ended_by = tools, Parsed(""), -1
        self._malformed_calls = self._turns_ended_otherwise = 0
        self.declared_branches = 0
        self._cut = self._thought = False
        self._began = datetime.now()  # a chat template that tells the date tells one date all through
        self._history: list[Message] = []
        self._recorded: list[RecordedTurns] = []

    @property
    def first_version(self) -> int | None:
        """See `TurnSampler.first_version`."""
        return self._turns.first_version

    @property
    def truncated(self) -> bool:
        """Return whether the last reply was cut at a limit."""
        return self._cut or any(each.truncated for each in self._recorded)

    @property
    def malformed_calls(self) -> int:
        """Tool calls of the policy that cannot be run."""
        return self._malformed_calls + sum(each.malformed_calls for each in self._recorded)

    @property
    def turns_ended_otherwise(self) -> int:
        """Turns before others that the policy has ended by another token than the chat template would have."""
        return self._turns_ended_otherwise + sum(each.turns_ended_otherwise for each in self._recorded)

    async def reply(self, messages: Sequence[Message], *, anew: bool = False, within: int | None = None) -> Reply:
        """Return the policy's next turn (see `hpcrl.rollouts.environments.Policy`).

        Raises
        ------
        ValueError
            The last reply was cut, or the rollout has an endpoint; the environment must not go on.
        TooManyBranchesError
            Earlier thinking was left out so often that there are too many sequences.
        EngineError
            No engine answered.
        EngineProtocolError
            An answer cannot be used for training.
        """
        if self._recorded:
            raise ValueError("a rollout with an endpoint for a program cannot be continued with replies")
        if self._cut and not anew:
            raise ValueError("a reply that was not finished cannot be followed by another")
        prompt = await self._rendered(messages, anew)
        if within is not None and prompt.length > within:
            return Reply(text="", finished=False, tokens=0, fits=False)
        self._say(messages, prompt)
        if self._turns.room() <= 0:
            self._cut = True
            return Reply(text="", finished=False, tokens=0, context=prompt.length, room=0)
        sampled = await self._turns.sample()
        token_ids = sampled.turn.token_ids
        self._cut = not sampled.finished
        size = token_ids.nbytes + sampled.turn.said.nbytes
        parsed = await beside_loop(partial(self._turns.parse, sampled, self._tools), size)
        self._parsed, self._ended_by = parsed, int(token_ids[-1])
        self._thought |= bool(parsed.thinking)
        if self._sampler.renderer.cuts_thinking:
            self._history.append(self._sampler.renderer.message_of(parsed))
        self._malformed_calls += sum(call.status != "ok" for call in parsed.calls)
        return Reply(
            text=parsed.text,
            finished=not self._cut,
            thinking=parsed.thinking,
            calls=parsed.calls,
            tokens=len(token_ids),
            context=len(self._branches.tokens()),
            room=self._turns.room(),
        )

    @contextlib.asynccontextmanager
    async def endpoint(self) -> AsyncIterator[PolicyEndpoint]:
        """Serve this rollout to a program (see `hpcrl.rollouts.environments.Policy`).

        Raises
        ------
        NotImplementedError
            There is no gateway.
        EngineError, TooManyBranchesError
            The program was not answered for this reason; raised when the context is left.
        ValueError
            Likewise: it asked the policy nothing.
        """
        if self._sampler.gateway is None:
            raise NotImplementedError("there is no gateway that could serve the rollout to a program")
        async with self._sampler.gateway.serve(self._turns) as (endpoint, recorded):
            self._recorded.append(recorded)
            try:
                yield endpoint
            except Exception:
                # a program that is not answered fails, too: this is why
                if recorded.failure is not None:
                    raise recorded.failure from None
                raise
            if recorded.failure is not None:
                raise recorded.failure
        if not self._branches.turns and not recorded.truncated:
            raise ValueError("the program ended before it asked the policy for a turn")

    async def rollout(self, member: int, outcome: Outcome, *, seconds: float) -> Rollout | None:
        """Return the finished rollout; None where nothing was sampled."""
        return await self._turns.rollout(member, outcome, seconds=seconds)

    async def _rendered(self, messages: Sequence[Message], anew: bool) -> _Prompt:
        """Return the prompt of the next turn; nothing changes."""
        renderer, branches = self._sampler.renderer, self._branches
        if anew or not len(branches):
            opening = None if anew else self._opening
            if opening is None:
                render = partial(renderer.opening, messages, tools=self._tools, now=self._began)
                opening = await beside_loop(render, sum(len(str(message.get("content"))) for message in messages))
            return _Prompt(np.asarray(opening, np.int32), 0, begins=True, anew=anew and len(branches) > 0)
        tokens = branches.tokens()
        extension = renderer.extension(
            messages,
            ended_by=self._ended_by,
            calls=self._parsed.calls,
            tools=self._tools,
            thought=self._thought,
            now=self._began,
        )
        if extension is not None:
            said, otherwise = np.asarray(extension.token_ids, np.int32), int(extension.ended_otherwise)
            return _Prompt(said, len(tokens), thought=self._thought, ended_otherwise=otherwise)
        history = [*self._history, *messages]
        render_whole = partial(renderer.whole, history, tools=self._tools, now=self._began)
        whole = await beside_loop(render_whole, tokens.token_ids.nbytes)
        prompt = np.asarray(whole.token_ids, np.int32)
        if branches.common_prefix(prompt) == len(tokens):
            return _Prompt(prompt[len(tokens) :], len(tokens), thought=whole.thinking)
        return _Prompt(prompt, 0, begins=True, thought=whole.thinking)

    def _say(self, messages: Sequence[Message], prompt: _Prompt) -> None:
        """Append messages to the sequence, or begin one, as `_rendered` says."""
        if prompt.begins:
            self._branches.begin(prompt.token_ids, declared=prompt.anew)
        else:
            self._branches.said(prompt.token_ids)
        if self._sampler.renderer.cuts_thinking:
            self._history = [*(() if prompt.anew else self._history), *messages]
        self._thought, self._cut = prompt.thought, False
        self._turns_ended_otherwise += prompt.ended_otherwise
        self.declared_branches += prompt.anew

"""Records one rollout of a program that speaks OpenAI's API: its messages become prompts, sampled tokens are kept.

It is the second front of a conversation (`hpcrl.rollouts.sampling.conversation`) and shares its sampling. A prompt that
follows a turn is the tokens up to that turn, as they were sampled, and those that the chat template writes behind them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.engines.rows import beside_loop
from hpcrl.rollouts.environments.base import ToolCall
from hpcrl.rollouts.gateway.answers import ChatAnswer, TokenAnswer
from hpcrl.rollouts.gateway.calls import RunningCalls
from hpcrl.rollouts.gateway.errors import GatewayError, bad_request, context_exceeded, rollout_failed
from hpcrl.rollouts.gateway.messages import (
    ChatCompletionRequest,
    MessageReader,
    TokenRequest,
    TokenSampling,
    unfollowed,
)
from hpcrl.rollouts.gateway.tree import TokenTree, TreeNode
from hpcrl.rollouts.gateway.work_queue import WorkQueue
from hpcrl.rollouts.rendering import Parsed
from hpcrl.rollouts.sampling.branches import TooManyBranchesError
from hpcrl.rollouts.sampling.sampler import Sampler
from hpcrl.rollouts.sampling.turn_sampler import SampledTurn, TurnSampler

_log = logging.getLogger(__name__)

_MAX_AT_ONCE = 64
"""Maximum number of requests of one rollout at the same time."""
_READABLE = ("ok", "unknown_tool")
"""Calls of these states have a name and arguments."""


class RolloutRecorder:
    """One rollout.

    Attributes
    ----------
    calls:
        Its requests that run.
    failure:
        Reason that the policy could not answer; None where it always did. The rollout fails with it.
    truncated:
        The last turn was cut at a limit, or there was no room for one.
    malformed_calls, turns_ended_otherwise:
        As those of `hpcrl.rollouts.sampling.conversation.Conversation`.
    """

    def __init__(
        self,
        turns: TurnSampler,
        counters: Counters,
        *,
        queue: WorkQueue,
        on_unfollowed: Callable[[str, Any], None],
    ) -> None:
        """Begin.

        Parameters
        ----------
        turns:
            Turns of the rollout.
        counters:
            Requests are counted there.
        queue:
            Requests wait there before they use the processor for long.
        on_unfollowed:
            Called with a field of a request that the recipe overrides, and its value.
        """
        self._turns, self._counters, self._on_unfollowed = turns, counters, on_unfollowed
        self._queue = queue
        self._renderer, self._tree = turns.sampler.renderer, TokenTree()
        self._recipe = _recipe_of(turns.sampler)
        # neither refers back to this object: a cycle would keep tokens and messages of an ended rollout until a full
        # pass of the garbage collector
        self._reader = MessageReader(knows_developer=partial(turns.sampler.renderer.reads, "developer"))
        self.calls: RunningCalls[ChatAnswer | TokenAnswer] = RunningCalls(partial(_count_join, counters))
        self._busy: set[int] = set()
        self._requests = 0
        self._began = datetime.now()  # a chat template that tells the date tells one date all through
        self.failure: Exception | None = None
        self.truncated = False
        self.malformed_calls = self.turns_ended_otherwise = 0

    async def chat(self, request: ChatCompletionRequest) -> ChatAnswer:
        """Answer a conversation with the next turn of the policy.

        Raises
        ------
        GatewayError
            It cannot be answered.
        """
        await self._queue.wait(self)
        offered = self._reader.tools(request.tools)
        (messages, known), tools = self._reader.read(request.messages, offered), offered.tools
        self._note_unfollowed(request)
        node = self._tree.find(messages, known)
        try:
            sequence, thought = await self._place(messages, tools, node)
        except ValueError as error:  # the chat template refuses it
            raise bad_request(str(error), "messages") from error
        parsed: Parsed | None = None

        async def parse(turn: SampledTurn) -> None:
            nonlocal parsed
            await self._queue.wait(self, ends_call=True)
            parsed = await beside_loop(partial(self._turns.parse, turn, tools), turn.turn.token_ids.nbytes)

        # a client may hang up while a long turn is parsed: a turn that it never gets is not trained on
        sampled = await self._sample(sequence, before=parse)
        assert parsed is not None
        answer = self._told(request, sampled, parsed, tools)
        self._tree.add(
            known[-1],
            TreeNode(
                before=node,
                position=len(messages),
                message=answer.turn,
                calls=answer.calls,
                sequence=sequence,
                end=len(sampled.prompt) + len(sampled.turn.token_ids),
                ended_by=int(sampled.turn.token_ids[-1]),
                thought=thought or bool(parsed.thinking),
            ),
        )
        return answer

    async def generate(self, request: TokenRequest) -> TokenAnswer:
        """Continue token ids that the program has rendered itself.

        Raises
        ------
        GatewayError
            It cannot be answered.
        """
        await self._queue.wait(self)
        prompt = _token_ids(request.token_ids, self._renderer.vocab_size)
        self._note_unfollowed(request.sampling_params)
        self._check()
        return TokenAnswer(await self._sample(self._begin(prompt), before=self._may_answer))

    async def close(self) -> None:
        """End what runs."""
        await self.calls.close()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request inside the context (GatewayError, 429, where too many of this rollout are there)."""
        if self._requests >= _MAX_AT_ONCE:
            raise GatewayError(
                429, f"{_MAX_AT_ONCE} requests of this rollout run already", code="rate_limit", retry=True
            )
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    # -- prompts

    async def _place(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], node: TreeNode | None
    ) -> tuple[int, bool]:
        """Return the sequence that the prompt is in now, and whether there is thinking in it."""
        self._check()
        if node is not None and (ids := self._extension(messages, tools, node)) is not None:
            return self._go_on(node, ids), node.thought
        full = self._tree.with_thinking(messages, node)
        render = partial(self._renderer.whole, full, tools=tools, now=self._began)
        whole = await beside_loop(render, sum(len(message["content"]) for message in full))
        return self._begin(np.asarray(whole.token_ids, np.int32)), whole.thinking

    def _extension(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], node: TreeNode
    ) -> NDArray[np.int32] | None:
        """Return the tokens to append behind a turn; None where the template now renders its history differently."""
        # some templates want results behind calls, which a program may leave out
        for calls in (node.calls, ()) if node.calls else ((),):
            try:
                extension = self._renderer.extension(
                    messages[node.position + 1 :],
                    ended_by=node.ended_by,
                    calls=calls,
                    tools=tools,
                    thought=node.thought,
                    now=self._began,
                )
            except ValueError as error:
                _log.debug("the chat template does not extend a turn: %s", error)
                continue
            if extension is None:
                return None
            self.turns_ended_otherwise += extension.ended_otherwise
            return np.asarray(extension.token_ids, np.int32)
        return None

    def _go_on(self, node: TreeNode, said: NDArray[np.int32]) -> int:
        """Continue the sequence of a turn, or begin a new one where that has been continued already."""
        branches = self._turns.branches
        tokens = branches.tokens(node.sequence)
        if len(tokens) == node.end and node.sequence not in self._busy:
            branches.said(said, node.sequence)
            return node.sequence
        return self._branch(np.concatenate([tokens.token_ids[: node.end], said]), node.sequence)

    def _begin(self, prompt: NDArray[np.int32]) -> int:
        """Continue the longest sequence that the prompt begins with, or begin a new one."""
        branches = self._turns.branches
        whole = [
            number
            for number in range(len(branches))
            if number not in self._busy
            and len(branches.tokens(number)) < len(prompt)
            and branches.common_prefix(prompt, number) == len(branches.tokens(number))
        ]
        if not whole:
            return self._branch(prompt, None)
        longest = max(whole, key=lambda number: len(branches.tokens(number)))
        branches.said(prompt[len(branches.tokens(longest)) :], longest)
        return longest

    def _branch(self, prompt: NDArray[np.int32], shared_with: int | None) -> int:
        try:
            return self._turns.branches.begin(prompt, shared_with=shared_with)
        except TooManyBranchesError as error:
            self.failure = error
            raise rollout_failed(error) from error

    # -- turns

    async def _may_answer(self, turn: SampledTurn) -> None:
        await self._queue.wait(self, ends_call=True)

    async def _sample(
        self, sequence: int, *, before: Callable[[SampledTurn], Awaitable[None]] | None = None
    ) -> SampledTurn:
        """Sample behind a prompt. If that, or ``before``, fails or is cancelled, withdraw the prompt."""
        branches = self._turns.branches
        self._busy.add(sequence)
        try:
            if self._turns.room(sequence) <= 0:
                self.truncated = True
                raise context_exceeded(len(branches.tokens(sequence)), self._turns.sampler.max_model_len)
            self._counters.gateway_requests += 1
            sampled = await self._turns.sample(sequence, before=before)
            self.truncated = not sampled.finished
            return sampled
        except BaseException as error:
            branches.withdraw(sequence)
            if isinstance(error, EngineError):
                self.failure = error
                raise GatewayError(503, "no engine answered", code="engine_failed") from error
            if not isinstance(error, Exception):
                self._counters.gateway_aborts += 1
            elif not isinstance(error, GatewayError):
                self.failure = error
            raise
        finally:
            self._busy.discard(sequence)

    def _told(
        self, request: ChatCompletionRequest, sampled: SampledTurn, parsed: Parsed, tools: Sequence[Mapping[str, Any]]
    ) -> ChatAnswer:
        """Return the answer for the program: calls where it has offered tools, and the text of unreadable ones."""
        offered = bool(tools) and request.tool_choice != "none"
        calls = tuple(call for call in parsed.calls if offered and call.status in _READABLE)
        others = [self._as_sampled(call, sampled) for call in parsed.calls if call not in calls]
        self.malformed_calls += sum(call.status != "ok" for call in parsed.calls)
        content = "\n".join(filter(None, [parsed.text, *others]))
        turn: dict[str, Any] = {"role": "assistant", "content": content}
        if parsed.thinking:
            turn["reasoning_content"] = parsed.thinking
        if calls:
            turn["tool_calls"] = [_as_message(call) for call in calls]
        pieces = None
        if request.logprobs:
            pieces = [self._renderer.full_text([token]) for token in sampled.turn.token_ids.tolist()]
        return ChatAnswer(sampled, turn, calls, pieces)

    def _as_sampled(self, call: ToolCall, sampled: SampledTurn) -> str:
        """Return the text of a call with its control tokens, as far as the format tells where it stands."""
        if call.span is None:
            return call.raw
        begin, end = call.span
        return self._renderer.full_text(sampled.turn.token_ids[begin:end].tolist())

    def _check(self) -> None:
        """Refuse requests of a rollout that has failed."""
        if self.failure is not None:
            raise rollout_failed(self.failure)

    def _note_unfollowed(self, request: ChatCompletionRequest | TokenSampling) -> None:
        for name, value in unfollowed(request, self._recipe).items():
            self._counters.gateway_overrides += 1
            self._on_unfollowed(name, value)


def _recipe_of(sampler: Sampler) -> dict[str, Any]:
    """Return how the recipe samples, by the fields of requests."""
    sampling = sampler.sampling
    recipe: dict[str, Any] = {"temperature": sampler.temperature, "stop": list(sampling.stop)}
    recipe |= dict.fromkeys(("max_tokens", "max_completion_tokens"), sampling.max_new_tokens)
    return recipe | {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p")}


def _count_join(counters: Counters) -> None:
    counters.gateway_joins += 1


def _token_ids(given: list[int], vocabulary: int) -> NDArray[np.int32]:
    """Return token ids of a request (GatewayError, 400, where there is none, or one that the model does not have)."""
    if not given or min(given) < 0 or max(given) >= vocabulary:
        raise bad_request(f"token_ids must be ids from 0 to {vocabulary - 1}, and at least one", "token_ids")
    return np.asarray(given, np.int32)


def _as_message(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}

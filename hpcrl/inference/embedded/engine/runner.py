"""One model step: inputs, forward pass, sampling, and what became of each sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcrl.inference.embedded.engine.attention import KVCache, PagedAttention, StepInputs, prepare_inputs
from hpcrl.inference.embedded.engine.request import EngineRequest, PromptLogprobs, TopLogprobs
from hpcrl.inference.embedded.engine.rows import Rows
from hpcrl.inference.embedded.engine.sampler import SampledTokens, SamplingBatch, TokenSampler, rank_and_top
from hpcrl.inference.embedded.engine.scheduler import Step
from hpcrl.inference.embedded.engine.states import RecurrentStates, StepStates
from hpcrl.inference.metrics import Counter
from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.decoder import Decoder


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens that a step sampled.

    Attributes
    ----------
    rows, token_ids:
        Rows that have a new token, and the tokens.
    finished:
        ``(index into rows, finish_reason, stop_reason)`` of those that ended with it.
    broken:
        Rows for which the model gave logits that are not finite. They have no new token and must not continue.
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    finished: list[tuple[int, str, int | None]]
    broken: list[int]


class ModelRunner:
    """The model, its KV cache and the sampler. Used on the model thread only.

    `model` may be replaced between steps by another of the same architecture.
    """

    def __init__(
        self, model: Decoder, cache: KVCache, rows: Rows, sampler: TokenSampler, *, routed_rows: Counter | None
    ) -> None:
        """Begin. ``routed_rows`` counts rows of experts that were returned; None: none are recorded."""
        self.model, self._cache, self._rows, self._sampler = model, cache, rows, sampler
        self._states = RecurrentStates(model.arch, rows.max_num_seqs, model.embed_tokens.weight.dtype)
        self._routed_rows = routed_rows if model.arch.routed_experts else None

    def kept_tensors(self) -> list[Tensor]:
        """Return the state of sequences kept between steps, one tensor per layer.

        These are keys and values, ``[blocks, block_size * heads * dim]`` of the cache, and inputs of convolutions and
        states of recurrent layers by row (`RecurrentStates`).
        """
        cache, states = self._cache, self._states
        kept = (cache.keys, cache.values, states.conv, states.recurrent)
        return [tensor for of_layers in kept for tensor in of_layers.values()]

    @torch.inference_mode()
    def run(self, step: Step) -> tuple[StepInputs, Tensor, NDArray[np.int64]]:
        """Compute the tokens of a step.

        Returns
        -------
        tuple
            The inputs, the logits ``[selected, vocab_size]`` and the flat indices they belong to: the last token
            of each sequence whose known tokens are now all computed, and every token of those that want
            ``prompt_logprobs``.
        """
        rows = self._rows
        inputs = prepare_inputs(step, rows, self._cache)
        last = inputs.starts[1:] - 1
        complete = rows.num_computed[step.rows] + step.counts == rows.num_tokens[step.rows]
        scored = rows.wants_prompt_logprobs[step.rows] & (rows.num_computed[step.rows] < rows.num_prompt[step.rows])
        if scored.any():
            wanted = np.repeat(scored, step.counts)
            wanted[last[complete]] = True
            selected = np.flatnonzero(wanted)
        else:
            selected = last[complete]
        chosen: dict[int, Tensor] = {}

        def record(layer: int, experts: Tensor) -> None:
            chosen[layer] = experts

        attention = PagedAttention(self._cache, inputs)
        states = StepStates(self._states, step.rows, inputs.starts.tolist())
        states.begin(rows.num_computed[step.rows] == 0)
        context = BatchContext(
            inputs.positions,
            attention,
            sparse=attention,
            recurrence=states,
            select=torch.from_numpy(selected),
            record=record if self._routed_rows is not None else None,
        )
        logits = self.model(inputs.input_ids, context)
        if chosen:
            # rows of dense layers stay zero
            slots, layers = inputs.slots.numpy(), np.asarray(list(chosen))
            self._cache.experts[slots[:, None], layers] = torch.stack(list(chosen.values()), dim=1).numpy()
        return inputs, logits, selected

    @torch.inference_mode()
    def sample(self, step: Step, inputs: StepInputs, logits: Tensor, selected: NDArray[np.int64]) -> StepResult:
        """Sample a token for each complete sequence. Call after `Scheduler.advance`.

        ``inputs``, ``logits [selected, vocab_size]`` and ``selected [selected]`` are what `run` returned of this step.
        """
        rows = self._rows
        broken = self._broken(step, inputs, logits, selected)
        complete = np.flatnonzero(rows.num_computed[step.rows] == rows.num_tokens[step.rows])
        if broken:
            complete = complete[~np.isin(step.rows[complete], broken)]
        if broken or len(selected) > len(complete) or rows.wants_prompt_logprobs[step.rows].any():
            self._score_prompts(step, inputs, logits, selected, broken)
            at = np.searchsorted(selected, inputs.starts[1:][complete] - 1)
            logits = logits[torch.from_numpy(at)]
        if not len(complete):
            return StepResult(complete, complete, [], broken)
        chosen = step.rows[complete]
        positions = rows.num_tokens[chosen]
        batch = SamplingBatch(
            temperature=rows.temperature[chosen],
            top_k=rows.top_k[chosen],
            top_p=rows.top_p[chosen],
            min_p=rows.min_p[chosen],
            seed=rows.seed[chosen],
            positions=positions,
            suppressed=[
                (i, sorted(rows.request(int(chosen[i])).params.suppressed_token_ids))
                for i in np.flatnonzero(positions < rows.suppress_until[chosen]).tolist()
            ],
            wants_logprobs=bool(rows.wants_logprobs[chosen].any()),
            num_top=int(rows.num_top[chosen].max()),
        )
        sampled = self._sampler(logits, batch)
        self._append(chosen, positions, sampled)
        return StepResult(chosen, sampled.token_ids, self._finished(chosen, sampled.token_ids), broken)

    def _broken(self, step: Step, inputs: StepInputs, logits: Tensor, selected: NDArray[np.int64]) -> list[int]:
        """Return rows whose logits ``[selected, vocab_size]``, or keys and values, are not finite."""
        wrong = selected[np.flatnonzero(~torch.isfinite(logits).all(-1).numpy())].tolist()
        tokens = np.asarray(sorted(inputs.broken.union(wrong)), np.int64)
        sequences = np.searchsorted(inputs.starts, tokens, side="right") - 1
        rows: list[int] = np.unique(step.rows[sequences]).tolist()
        return rows

    def _append(self, chosen: NDArray[np.int64], positions: NDArray[np.int64], sampled: SampledTokens) -> None:
        rows = self._rows
        rows.tokens[chosen, positions] = sampled.token_ids
        rows.num_tokens[chosen] += 1
        if sampled.logprobs is None or sampled.ranks is None:
            return
        rows.logprobs[chosen, positions] = sampled.logprobs
        rows.ranks[chosen, positions] = sampled.ranks
        if sampled.top_ids is None or sampled.top_logprobs is None:
            return
        for i in np.flatnonzero(rows.num_top[chosen] > 0).tolist():
            row, k = int(chosen[i]), int(rows.num_top[chosen[i]])
            top = TopLogprobs(sampled.top_ids[i, :k].tolist(), sampled.top_logprobs[i, :k].tolist())
            rows.request(row).top.append(top)

    def _finished(self, chosen: NDArray[np.int64], token_ids: NDArray[np.int64]) -> list[tuple[int, str, int | None]]:
        """Return the sequences that end with their new token; the order of the tests is vLLM's."""
        rows = self._rows
        at_eos = token_ids == rows.eos_token_id[chosen]
        at_limit = rows.num_tokens[chosen] >= rows.length_limit[chosen]
        finished: list[tuple[int, str, int | None]] = []
        for i in np.flatnonzero(at_eos | at_limit | rows.has_stop_tokens[chosen]).tolist():
            token = int(token_ids[i])
            if at_eos[i]:
                finished.append((i, "stop", None))
            elif token in rows.request(int(chosen[i])).params.stop_token_ids:
                finished.append((i, "stop", token))
            elif at_limit[i]:
                finished.append((i, "length", None))
        return finished

    def _score_prompts(
        self, step: Step, inputs: StepInputs, logits: Tensor, selected: NDArray[np.int64], broken: list[int]
    ) -> None:
        """Compute log-probabilities of the prompt tokens that follow the computed ones."""
        rows = self._rows
        for i in np.flatnonzero(rows.wants_prompt_logprobs[step.rows]).tolist():
            row, count = int(step.rows[i]), int(step.counts[i])
            if row in broken:
                continue
            request = rows.request(row)
            first = int(rows.num_computed[row]) - count  # position of the first token computed in this step
            scored = min(count, request.num_prompt - 1 - first)
            if scored <= 0:
                continue
            at = int(np.searchsorted(selected, inputs.starts[i]))
            logprobs = logits[at : at + scored].log_softmax(-1)
            targets = rows.tokens[row, first + 1 : first + 1 + scored].astype(np.int64)
            k = request.params.prompt_logprobs or 0
            num_top = logprobs.shape[-1] if k == -1 else k
            values, ranks, top_ids, top_values = rank_and_top(logprobs, torch.from_numpy(targets), num_top)
            for j in range(scored):
                top = TopLogprobs([], [])
                if top_ids is not None and top_values is not None:
                    top = TopLogprobs(top_ids[j].tolist(), top_values[j].tolist())
                request.prompt_logprobs.append(PromptLogprobs(float(values[j]), int(ranks[j]), top))

    def experts_of(self, request: EngineRequest) -> NDArray[np.generic] | None:
        """Return the unreported experts of a running request's computed tokens, and count them as reported.

        Returns
        -------
        ndarray
            ``[rows, layers, experts_per_token]``, up to the last known token, which is not computed; None where experts
            are not recorded or the request holds no KV.
        """
        rows, row = self._rows, request.row
        if self._routed_rows is None or row is None:
            return None
        start = request.experts_reported
        end = min(int(rows.num_computed[row]), int(rows.num_tokens[row]) - 1)
        positions = np.arange(start, max(start, end))
        request.experts_reported = max(start, end)
        # other requests with the same salt computed them: another rollout, an earlier turn of this one, another engine
        known = [request.num_cached_tokens - request.num_fetched_tokens, request.num_cached_tokens]
        own, cached = (min(max(tokens - start, 0), len(positions)) for tokens in known)
        self._routed_rows.inc(own, "prefix_cache")
        self._routed_rows.inc(cached - own, "fetched")
        self._routed_rows.inc(len(positions) - cached, "computed")
        size = self._cache.block_size
        experts: NDArray[np.generic] = self._cache.experts[
            rows.block_table[row, positions // size] * size + positions % size
        ]
        return experts

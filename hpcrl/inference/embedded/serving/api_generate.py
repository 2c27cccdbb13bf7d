"""``/inference/v1/generate``: token ids in, token ids out, with everything that RL needs to know of each."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from hpcrl.inference.embedded.engine.params import MAX_COUNT
from hpcrl.inference.embedded.engine.request import Output
from hpcrl.inference.embedded.serving.api_common import (
    clamp,
    encode_as_text,
    frame_response,
    json_response,
    npy_bytes,
    prompt_logprobs_json,
    send_events,
    send_frames,
    stop_strings,
    takes_frames,
    to_params,
    usage,
    wants_usage,
)
from hpcrl.inference.embedded.serving.errors import bad_request
from hpcrl.inference.embedded.serving.protocol import GenerateRequest, KvTransferParams, check_cache_salt, parse
from hpcrl.inference.embedded.serving.serving import CallPrompt, CallSequences, Serving, candidates
from hpcrl.inference.embedded.serving.text import TextStream
from hpcrl.inference.kept_rows import KeptRows
from hpcrl.network.routed_experts_reference import PATH as ROWS_PATH
from hpcrl.storage.msgspec_types import decode_json

_Columns = Callable[[Output, int | None], dict[str, Any]]
"""Returns the data of each token of an output; the number is that of requested log-probabilities."""


class GenerateApi:
    """Handlers of the token endpoint.

    What is asked wrongly is an `ApiError`, which `hpcrl.inference.embedded.serving.errors` answers.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving, self._rows = serving, KeptRows()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(ROWS_PATH, self.rows),
            web.post("/inference/v1/generate", self.generate),
            web.post("/inference/v1/abort_requests", self.abort_requests),
        ]

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Generate ``n`` sequences from one prompt."""
        serving = self._serving
        request = await parse(http, GenerateRequest)
        check_cache_salt(request.cache_salt)
        serving.check_model(request.model)
        serving.check_prompt(request.token_ids)
        sampling = request.sampling_params
        given = None if sampling.max_tokens is msgspec.UNSET else sampling.max_tokens
        max_tokens = serving.max_tokens(given, len(request.token_ids))
        serving.check_logprobs("logprobs", sampling.logprobs)
        serving.check_logprobs("prompt_logprobs", sampling.prompt_logprobs)
        limit = serving.engine.config.max_num_seqs
        if sampling.n > limit:
            raise bad_request(f"n must be at most max_num_seqs ({limit}), not {sampling.n}", "n")
        # up to one entry is the sampled token itself, for which no candidates need be found
        wanted = 0 if sampling.logprobs in (0, 1) else sampling.logprobs
        params = to_params(serving.facts, sampling, max_tokens=max_tokens, logprobs=wanted)
        transfer = request.kv_transfer_params or KvTransferParams()
        if transfer.do_remote_decode:
            # this answer is not read: the decode engine gets the rows with the KV
            params = replace(params, routed_experts_prompt_start=len(request.token_ids))
        stops = stop_strings(sampling.stop)
        if stops and not sampling.detokenize:
            raise bad_request("stop strings need detokenize", "stop")
        if not 1 <= (sampling.stream_interval or 1) <= MAX_COUNT or sampling.stream_interval == 0:
            what = f"stream_interval must be between 1 and {MAX_COUNT}, not {sampling.stream_interval}"
            raise bad_request(what, "stream_interval")
        if request.stream and sampling.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs are not available when stream is true", "prompt_logprobs")

        def make_text() -> TextStream | None:
            if not stops:
                return None
            return TextStream(
                serving.tokenizer,
                stop=stops,
                include_stop=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
                skip_special_tokens=sampling.skip_special_tokens,
            )

        name = f"generate-tokens-{serving.request_id(http, request.request_id)}"
        async with serving.generate(
            [CallPrompt(request_id=name, token_ids=request.token_ids)],
            params,
            n=sampling.n,
            stream=bool(request.stream),
            cache_salt=request.cache_salt,
            priority=request.priority,
            make_text=make_text,
            has_stop_strings=bool(stops),
            stream_interval=sampling.stream_interval or 1,
            experts_in_parts=bool(request.stream),
            prefill=transfer.prefill,
        ) as generation:
            # a router reads answers that are meant for another engine
            framed = takes_frames(http) and not transfer.do_remote_decode
            aside = request.rows_by_reference and not transfer.do_remote_decode
            columns = _binary_columns if framed else self._columns_aside(http) if aside else _text_columns
            if request.rows_unwanted:
                columns = _without_rows(columns)
            if request.stream:
                chunks = self._chunks(request, name, generation, columns)
                return await (send_frames if framed else send_events)(http, chunks)
            outputs = await generation.final()
            whole = self._whole(request, name, outputs, columns, handover=_handover(http, transfer))
            return (frame_response if framed else json_response)(whole)

    def _columns_aside(self, http: web.Request) -> _Columns:
        """Return text columns without rows of experts, which are kept here until the client fetches them."""
        name, parts = uuid.uuid4().hex, itertools.count()

        def columns(output: Output, logprobs: int | None) -> dict[str, Any]:
            rows, kept = npy_bytes(output.routed_experts), None
            if rows is not None:
                kept = self._rows.keep(f"{name}/{next(parts)}", bytes(rows), engine=http.host)
            return {**_text_of_tokens(output, logprobs), "routed_experts": kept}

        return columns

    async def rows(self, http: web.Request) -> web.Response:
        """Return the kept rows of an answer, once."""
        rows = await self._rows.take(http.query.get("name", ""))
        return web.Response(status=404) if rows is None else web.Response(body=rows)

    def _whole(
        self,
        request: GenerateRequest,
        name: str,
        outputs: list[Output],
        columns: _Columns,
        *,
        handover: KvTransferParams | None,
    ) -> dict[str, Any]:
        return {
            "request_id": name,
            "model": self._serving.facts.names[0],
            "created": int(time.time()),
            "usage": usage(self._serving.facts, len(request.token_ids), outputs),
            "prompt_logprobs": prompt_logprobs_json(request.token_ids, outputs[0].prompt_logprobs),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": request.token_ids if request.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": handover,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [self._choice(request, i, output, columns) for i, output in enumerate(outputs)],
        }

    async def _chunks(
        self, request: GenerateRequest, name: str, generation: CallSequences, columns: _Columns
    ) -> AsyncIterator[dict[str, Any]]:
        include_usage, continuous = wants_usage(request.stream_options)
        facts, prompt_length = self._serving.facts, len(request.token_ids)
        seen: dict[int, Output] = {}
        first = True
        async for index, output in generation.outputs():
            chunk: dict[str, Any] = {"request_id": name, "usage": None, "output_mode": "tokens"}
            chunk["choices"] = [self._choice(request, index, output, columns)]
            if first and request.return_token_ids:
                chunk["prompt_token_ids"] = request.token_ids
            first = False
            _count(seen, index, output)
            if continuous:
                chunk["usage"] = usage(facts, prompt_length, [seen[index]])
            yield chunk
        if include_usage:
            total = usage(facts, prompt_length, list(seen.values()))
            yield {"request_id": name, "usage": total, "output_mode": "tokens", "choices": []}

    def _choice(self, request: GenerateRequest, index: int, output: Output, columns: _Columns) -> dict[str, Any]:
        finished = output.finish_reason is not None
        return {
            "index": index,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "sampling_mask": None,
            "weight_versions": [asdict(span) for span in output.weight_versions] if finished else None,
            **columns(output, request.sampling_params.logprobs),
        }

    async def abort_requests(self, http: web.Request) -> web.Response:
        """End requests by the ``request_id`` of their answers; those that are not there are ignored."""
        try:
            body = decode_json(await http.read())
        except msgspec.DecodeError as error:
            raise bad_request(f"the body is not JSON: {error}") from error
        names = body.get("request_ids") if isinstance(body, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise bad_request("request_ids must be a list of names", "request_ids")
        self._serving.engine.abort(self._serving.find(names))
        return web.Response()


def _handover(http: web.Request, transfer: KvTransferParams) -> KvTransferParams | None:
    """Return the transfer parameters for the engine that continues from the prompt; None if none does.

    They hold the address of this engine that the caller has reached.
    """
    if not transfer.do_remote_decode or http.transport is None:
        return None
    host, port = http.transport.get_extra_info("sockname")[:2]
    return KvTransferParams(do_remote_prefill=True, remote_host=host, remote_port=port)


def _without_rows(columns: _Columns) -> _Columns:
    """Return ``columns`` without rows of routed experts, for clients that did not request them."""
    return lambda output, logprobs: columns(replace(output, routed_experts=None), logprobs)


def _text_columns(output: Output, logprobs: int | None) -> dict[str, Any]:
    """Return the data of each token in vLLM's format."""
    return {**_text_of_tokens(output, logprobs), "routed_experts": encode_as_text(output.routed_experts)}


def _text_of_tokens(output: Output, logprobs: int | None) -> dict[str, Any]:
    return {"token_ids": output.token_ids, "logprobs": _logprobs(output, logprobs)}


def _binary_columns(output: Output, logprobs: int | None) -> dict[str, Any]:
    """Return the data of each token in the format of `hpcrl.network.generate_frames`."""
    scores = None if logprobs is None else np.array([clamp(logprob) for logprob in output.logprobs], "<f8").tobytes()
    return {
        "token_ids": np.array(output.token_ids, "<i4").tobytes(),
        "routed_experts": npy_bytes(output.routed_experts),
        "logprobs": scores,
    }


def _count(seen: dict[int, Output], index: int, output: Output) -> None:
    """Keep the number of tokens of each sequence (and what was cached), nothing else."""
    known = seen.setdefault(index, Output([], [], [], [], num_cached_tokens=output.num_cached_tokens))
    known.token_ids += output.token_ids


def _logprobs(output: Output, wanted: int | None) -> dict[str, Any] | None:
    """Return one entry per token; ``top_logprobs`` begins with the sampled one, ``max(wanted, 1)`` at most."""
    if wanted is None:
        return None
    content = []
    for i in range(len(output.token_ids)):
        entries = [
            {"token_id": token, "logprob": clamp(logprob), "rank": rank}
            for token, logprob, rank in candidates(output, i, -1 if wanted == -1 else max(wanted, 1))
        ]
        content.append({**entries[0], "top_logprobs": entries})
    return {"content": content}

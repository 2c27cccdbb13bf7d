"""State of running sequences that the model step needs, as arrays with a row for each.

A step touches many sequences and must not run Python for each of them; so everything that changes with each
token lives here, and requests keep only what changes when they start, stop or cross a block.
"""

from __future__ import annotations

import numpy as np

from hpcrl.inference.embedded.engine.request import EngineRequest


class Rows:
    """State of up to ``max_num_seqs`` running sequences.

    Arrays are ``[rows]`` or ``[rows, max_model_len]`` (tokens) or ``[rows, max_blocks]`` (block table).
    ``num_tokens`` counts known tokens (prompt and sampled), ``num_computed`` those whose KV is in the cache.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        r, self.block_size = max_num_seqs, block_size
        self.max_num_seqs = max_num_seqs
        self.max_blocks = -(-max_model_len // block_size)
        # np.empty takes address space, not memory, until a row grows into it
        self.tokens = np.empty((r, max_model_len), np.int32)
        self.logprobs = np.empty((r, max_model_len), np.float32)
        self.ranks = np.empty((r, max_model_len), np.int32)
        self.block_table = np.zeros((r, self.max_blocks), np.int64)
        self.num_tokens = np.zeros(r, np.int64)
        self.num_computed = np.zeros(r, np.int64)
        self.num_blocks = np.zeros(r, np.int64)
        self.num_prompt = np.zeros(r, np.int64)
        self.length_limit = np.zeros(r, np.int64)
        self.suppress_until = np.zeros(r, np.int64)
        self.eos_token_id = np.zeros(r, np.int64)
        self.temperature = np.zeros(r, np.float32)
        self.top_p = np.zeros(r, np.float32)
        self.min_p = np.zeros(r, np.float32)
        self.top_k = np.zeros(r, np.int64)
        self.seed = np.zeros(r, np.int64)
        self.num_top = np.zeros(r, np.int64)
        self.wants_logprobs = np.zeros(r, np.bool_)
        self.wants_prompt_logprobs = np.zeros(r, np.bool_)
        self.has_stop_tokens = np.zeros(r, np.bool_)
        self.stream_interval = np.zeros(r, np.int64)
        self.requests: list[EngineRequest | None] = [None] * r
        self._free = list(range(r - 1, -1, -1))
        self._max_model_len = max_model_len

    @property
    def num_free(self) -> int:
        return len(self._free)

    def request(self, row: int) -> EngineRequest:
        """Return the request in an occupied row."""
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def output_length(self, row: int) -> int:
        """Return the number of generated tokens of a row."""
        return int(self.num_tokens[row] - self.num_prompt[row])

    def known_tokens(self, request: EngineRequest) -> int:
        """Return the number of known tokens (prompt and sampled) of a request, also of one without a row."""
        return len(request.tokens) if request.row is None else int(self.num_tokens[request.row])

    def occupy(self, request: EngineRequest, blocks: list[int], num_computed: int, seed: int, vocab_size: int) -> int:
        """Give a request a row.

        Parameters
        ----------
        request:
            Its tokens, and log-probabilities of an earlier stay, are copied in.
        blocks:
            Blocks it holds already (its cached prefix).
        num_computed:
            Tokens whose KV those blocks hold.
        seed:
            Its own seed or one drawn for it.
        vocab_size:
            Number of candidates that "all" means.
        """
        # the row is taken only by the last line: a request with invalid numbers then leaves it free
        row = self._free[-1]
        params, n, p = request.params, len(request.tokens), request.num_prompt
        self.tokens[row, :n] = request.tokens
        self.logprobs[row, p:n] = request.logprobs
        self.ranks[row, p:n] = request.ranks
        self.block_table[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.num_tokens[row] = n
        self.num_computed[row] = num_computed
        self.num_prompt[row] = p
        self.length_limit[row] = min(p + params.max_tokens, self._max_model_len)
        self.suppress_until[row] = p + params.min_tokens if params.suppressed_token_ids else 0
        self.eos_token_id[row] = -1 if params.eos_token_id is None else params.eos_token_id
        # a greedy choice is the same under any restriction, and its log-probability is to be that of no restriction
        greedy = params.greedy
        self.temperature[row] = 0.0 if greedy else params.temperature
        self.top_p[row] = 1.0 if greedy else params.top_p
        self.min_p[row] = 0.0 if greedy else params.min_p
        self.top_k[row] = params.top_k if params.top_k > 0 and not greedy else vocab_size
        self.seed[row] = seed
        wanted = params.logprobs
        self.num_top[row] = 0 if wanted is None else vocab_size if wanted == -1 else wanted
        self.wants_logprobs[row] = wanted is not None
        self.wants_prompt_logprobs[row] = params.prompt_logprobs is not None
        self.has_stop_tokens[row] = bool(params.stop_token_ids)
        self.stream_interval[row] = request.stream_interval
        self.requests[row] = request
        request.row = self._free.pop()
        return row

    def append_blocks(self, row: int, blocks: list[int]) -> None:
        """Add blocks to the end of a row's table."""
        n = int(self.num_blocks[row])
        self.block_table[row, n : n + len(blocks)] = blocks
        self.num_blocks[row] = n + len(blocks)

    def blocks(self, row: int) -> list[int]:
        """Return the blocks that a row holds, in sequence order."""
        held: list[int] = self.block_table[row, : self.num_blocks[row]].tolist()
        return held

    def vacate(self, row: int) -> None:
        """Copy tokens and log-probabilities back into the request and free the row."""
        request = self.request(row)
        n, p = int(self.num_tokens[row]), request.num_prompt
        request.tokens = self.tokens[row, :n].copy()
        request.logprobs = self.logprobs[row, p:n].copy()
        request.ranks = self.ranks[row, p:n].copy()
        request.row = None
        self.requests[row] = None
        self.num_blocks[row] = 0
        self._free.append(row)

"""The command line of the server. Flags that vLLM has too carry vLLM's names."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hpcrl.errors import UsageError
from hpcrl.inference.embedded.weights.updates import ReaderConfig
from hpcrl.weights.read.share import Pace
from hpcrl.weights.read.subscriber import ReaderSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings from the command line; see `parse_settings` for each flag."""

    model: Path
    host: str
    port: int
    served_model_name: tuple[str, ...]
    dtype: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    block_size: int
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int
    enable_prefix_caching: bool
    enable_return_routed_experts: bool
    enable_prompt_tokens_details: bool
    logprobs_mode: str
    max_logprobs: int
    scheduling_policy: str
    generation_config: str
    skip_tokenizer_init: bool
    seed: int
    torch_threads: int
    weight_version: str
    token_file: Path | None
    open_health: bool
    colocated: bool
    reader: ReaderConfig


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _weight_transfer(text: str) -> str:
    try:
        backend = json.loads(text)["backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f'must be like {{"backend": "fs"}}, not {text!r}') from error
    if backend != "fs":
        raise argparse.ArgumentTypeError(f"the embedded engine has the backend 'fs' only, not {backend!r}")
    return text


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from error
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def _parser() -> _Parser:
    parser = _Parser(prog="python -m hpcrl.inference.embedded.server", allow_abbrev=False, description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model directory: config.json, *.safetensors, tokenizer")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0 lets the system choose")
    add("--served-model-name", nargs="+", help="names to serve under; the model directory where omitted")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto is what config.json says")
    add("--max-model-len", type=_positive, help="tokens of a sequence; the model's where omitted")
    add("--max-num-seqs", type=_positive, default=256, help="sequences in a batch")
    add("--max-num-batched-tokens", type=_positive, help="tokens of a step; 2048, or more for more sequences")
    add("--block-size", type=_positive, default=16, help="tokens of a KV block")
    add("--num-gpu-blocks-override", type=_positive, help="KV blocks, in place of the memory flag")
    add("--kv-cache-memory-bytes", type=_positive, default=256 << 20, help="maximum memory for KV")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--enable-return-routed-experts", action=argparse.BooleanOptionalAction, default=False)
    add("--enable-prompt-tokens-details", action=argparse.BooleanOptionalAction, default=False)
    add("--logprobs-mode", choices=("raw_logprobs", "processed_logprobs"), default="raw_logprobs")
    add("--max-logprobs", type=int, default=20, help="candidates a request may ask for; -1 for all")
    add("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    add("--generation-config", choices=("auto", "vllm"), default="auto", help="vllm: ignore the model's defaults")
    add("--skip-tokenizer-init", action="store_true", help="serve token ids only")
    add("--seed", type=int, default=0, help="seed of requests without one")
    add("--weight-transfer-config", type=_weight_transfer, help='{"backend": "fs"}, which is the only one')
    # flags that vLLM does not have
    add("--torch-threads", type=_positive, default=1, help="threads of a step")
    add("--token-file", type=Path, help="outside of a run: accept only requests with the token in this file")
    add("--open-health", action="store_true", help="GET /health needs no token: for a router that has none to send")
    add("--colocated", action="store_true", help="start without weights and KV: a trainer on this node gives them")
    add("--weight-version", default="default", help="label of the weights at the start")
    add("--weight-transfer-root", type=Path, help="refuse hand-offs that lie elsewhere")
    add("--weight-reader", metavar="NAME", help="register as this reader of the root, and take leases")
    add("--verify-content", action=argparse.BooleanOptionalAction, default=True, help="hash hand-offs while reading")
    add(
        "--weight-lease-timeout-s",
        type=_positive_float,
        default=60.0,
        help="timeout after which a silent reader counts as dead",
    )
    add("--weight-timeout-floor-s", type=_positive_float, default=30.0, help="minimum timeout of a read")
    add("--weight-min-bandwidth-mib-s", type=_positive_float, default=50.0, help="slowest rate that counts as working")
    add("--weight-read-streams", type=_positive, default=4, help="segments that are read ahead")
    add("--weight-node-cache", type=Path, help="directory of this node, to read each byte once a node")
    add("--weight-node-cache-bytes", type=_positive, default=16 << 30, help="maximum bytes in it")
    add("--weight-fanout-host", help="address to serve versions at to other nodes, and take them from these")
    add("--weight-fanout-degree", type=_positive, default=2, help="nodes that one node serves")
    # taken for the sake of one command line for both servers; they are always so here
    for flag in ("--enable-scale-out", "--enforce-eager", "--enable-chunked-prefill"):
        add(flag, action="store_true", help=argparse.SUPPRESS)
    return parser


def parse_settings(argv: list[str] | None) -> ServerSettings:
    """Read the command line.

    Raises
    ------
    UsageError
        A flag is unknown, missing or out of bounds.
    SystemExit
        After ``--help``.
    """
    values = vars(_parser().parse_args(argv))
    for name in ("weight_transfer_config", "enable_scale_out", "enforce_eager", "enable_chunked_prefill"):
        del values[name]
    if not 0 <= values["port"] < 1 << 16:
        raise UsageError(f"--port must be between 0 and 65535, not {values['port']}")
    values["served_model_name"] = tuple(values["served_model_name"] or [str(values["model"])])
    values["reader"] = _reader(values)
    return ServerSettings(**values)


def _reader(values: dict[str, Any]) -> ReaderConfig:
    """Take what belongs to the reader of hand-offs out of ``values``."""
    root, name = values.pop("weight_transfer_root"), values.pop("weight_reader")
    if name is not None and root is None:
        raise UsageError("--weight-reader needs --weight-transfer-root")
    bandwidth = values.pop("weight_min_bandwidth_mib_s") * (1 << 20)
    settings = ReaderSettings(
        expiry_s=values.pop("weight_lease_timeout_s"),
        pace=Pace(values.pop("weight_timeout_floor_s"), bandwidth),
        streams=values.pop("weight_read_streams"),
        cache_dir=values.pop("weight_node_cache"),
        cache_bytes=values.pop("weight_node_cache_bytes"),
        fanout_host=values.pop("weight_fanout_host"),
        fanout_degree=values.pop("weight_fanout_degree"),
        verify=values.pop("verify_content"),
    )
    if settings.fanout_host is not None and (settings.cache_dir is None or name is None):
        raise UsageError("--weight-fanout-host needs --weight-node-cache and --weight-reader")
    return ReaderConfig(root, name, settings)

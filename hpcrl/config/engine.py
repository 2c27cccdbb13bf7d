"""The inference role of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hpcrl.config.base import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)
from hpcrl.config.kvstore import KvStoreConfig


class RouterConfig(StrictModel):
    """Choice of the engine for each request."""

    kind: Literal["auto", "direct", "vllm-router", "dynamo"] = "auto"
    """``vllm-router`` is vLLM's own router, as a role of the run: the orchestrator sends all requests to its one
    address. ``direct``: the orchestrator chooses itself, the engine with the fewest rollouts. ``dynamo``: NVIDIA
    Dynamo's KV-aware router in its place, in front of the same engines. ``auto``: ``vllm-router`` for the backend
    ``vllm`` and between ``prefill`` and ``decode``, else ``direct``."""
    policy: Literal["sticky_least_loaded", "consistent_hash", "round_robin", "random", "power_of_two"] = (
        "sticky_least_loaded"
    )
    """``vllm-router``: how it chooses. The first two keep a group of rollouts, with all of its turns, on one engine,
    where its prefix is; ``sticky_least_loaded`` spreads groups more evenly. The others ignore prefixes."""
    session_ttl_s: NonNegativeFloat = 600.0
    """``dynamo``: a group of rollouts, with all of its turns, stays with its engine until nothing came of it for so
    many seconds. 0: the engine of each request is chosen anew, by what is in its cache and by its load."""
    health_interval_s: PositiveInt = 2
    """Seconds between two questions to each engine; after two without an answer it gets none of the
    requests."""


class EngineGroupConfig(StrictModel):
    """The engines for prefill, or those for decode, of disaggregated serving."""

    replicas: PositiveInt
    """Independent engines of this kind; each holds the whole model."""
    nodes: PositiveInt
    """Nodes of one replica."""
    max_num_seqs: PositiveInt | None = None
    """Sequences that one rank of these engines runs at once. None: ``engine.max_num_seqs``."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens of one engine step of a rank. None: ``engine.max_num_batched_tokens``."""
    vllm_args: dict[str, Any] = {}
    """As ``engine.vllm_args``, for these engines alone."""


class EngineMemoryConfig(StrictModel):
    """Memory of vLLM engines. The planner computes with it; the embedded engine reads ``kv_cache_gib`` instead."""

    weights: Literal["as_dtype", "fp8"] = "as_dtype"
    """``fp8``: matrices of layers in FP8 with scales of 128 x 128 blocks."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Dtype of the KV cache. ``auto``: that of ``dtype``."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that a vLLM engine may use. With ``placement: shared_gpus`` the trainer has the rest, and
    this share must be free when an engine starts."""
    kv_offload_gib: NonNegativeFloat = 0.0
    """Host memory of each node for KV blocks that left the GPU, in GiB, shared evenly by its ranks; ``kv_store`` is the
    pool of all nodes."""
    kv_offload_disk_gib: NonNegativeFloat = 0.0
    """Room on each node's scratch disk for KV blocks that left this host memory, in GiB; 0 for none. The oldest go
    first. Needs ``paths.scratch`` of the site."""


class EngineConfig(StrictModel):
    """The inference role."""

    backend: Literal["embedded", "vllm"] = "embedded"
    """Server: ``embedded`` runs the project's own torch model behind vLLM's API, ``vllm`` is vLLM."""
    placement: Literal["apart", "shared_node", "shared_gpus", "colocated"] = "apart"
    """``apart``: engines have nodes of their own, generate while the trainer trains, and read weights from files.
    ``shared_node``: the same on the trainer's node, of which there is one: engines have the GPUs that ``trainer.ranks``
    leaves there, the same number each (docs/admins.md, One node for trainer and engines).
    ``shared_gpus``: the same on the trainer's node and on the trainer's own GPUs, each with a part of their memory
    (docs/admins.md, Trainer and engines on the same GPUs).
    ``colocated``: trainer and engines take turns on the same devices of one node (docs/training.md, Trainer and engines
    in turns); ``rollouts.max_off_policy_steps`` is 0 or 1 then."""
    device: Literal["auto", "cpu"] = "auto"
    """Devices of ``vllm``. ``auto``: a rank on each GPU of its nodes, or on CPUs if they have none; ``cpu``: one rank a
    node, on CPUs. ``embedded`` is always on CPUs; set ``cpu`` to colocate it with a trainer on GPUs."""
    replicas: PositiveInt = 1
    """Independent engines; each serves the whole model."""
    nodes: PositiveInt = 1
    """Nodes of one replica."""
    prefill: EngineGroupConfig | None = None
    """Engines that compute prompts only; together with ``decode``, in place of ``replicas`` and ``nodes``."""
    decode: EngineGroupConfig | None = None
    """Engines that decode after prompts that ``prefill`` computed."""
    kv_transfer: Literal["auto", "nixl", "mooncake"] = "auto"
    """``prefill`` and ``decode`` with ``vllm``: what carries KV between them. ``auto``: NIXL between GPUs, Mooncake's
    transfer engine over TCP between CPUs."""
    max_model_len: PositiveInt = 256
    """Longest sequence in tokens, prompt and answer together."""
    max_num_seqs: PositiveInt = 64
    """Sequences that are decoded at once."""
    max_num_batched_tokens: PositiveInt = 2048
    """Tokens of one engine step (prefill is cut to fit)."""
    block_size: PositiveInt = 16
    """Tokens of a KV cache block; prefixes are reused in whole blocks."""
    kv_cache_gib: PositiveFloat = 0.25
    """Memory of the KV cache in GiB. vLLM on CPUs takes whole GiB (rounded up). On GPUs it takes what its other needs
    leave of ``memory.gpu_memory_utilization`` instead, except with ``placement: shared_gpus``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and KV cache."""
    pause: Literal["keep", "none"] = "keep"
    """During a weight update: ``keep`` freezes requests until the new weights are in, ``none`` continues to generate
    with the old ones (``embedded`` only: vLLM loads in place). Requests and their KV survive in both."""
    threads: PositiveInt = 1
    """CPU threads of each engine."""
    return_routed_experts: bool = False
    """Engines return the experts of every token (layers x experts a token, one byte each up to 256 experts), and the
    trainer says where it chooses others: ``routing_mismatch``. Mixtures of experts only."""
    routed_experts_gib: NonNegativeFloat = 1.0
    """Experts of prompts that the orchestrator keeps in its memory, for rollouts whose KV came from the pool, the
    host or a prefill engine: an engine has none of what it did not compute. Least recently used prompts go first."""
    tp: PositiveInt = 1
    """Tensor parallelism of a replica; its other ranks are data parallel, and experts are distributed over all of them
    (planned, for vLLM engines)."""
    memory: EngineMemoryConfig = EngineMemoryConfig()
    """Memory of a vLLM engine (planned)."""
    kv_store: KvStoreConfig | None = None
    """Pool of KV blocks that all engines share (Mooncake Store). None: each keeps its own."""
    router: RouterConfig = RouterConfig()
    """Choice of the engine for each request."""
    vllm_args: dict[str, Any] = {}
    """Further flags of vLLM by long name without dashes, for example ``attention-backend: FLASHINFER``. ``true`` is the
    flag alone, ``false`` its ``--no-`` form; lists and mappings are passed as JSON. Flags that hpcrl sets are refused,
    and all are checked by the installed vLLM's own parser before a run starts."""

    @property
    def is_colocated(self) -> bool:
        """Return whether engines take turns with the trainer on its devices."""
        return self.placement == "colocated"

    @property
    def shares_node(self) -> bool:
        """Return whether engines are on the trainer's node, and generate while it trains."""
        return self.placement == "shared_node" or self.shares_gpus

    @property
    def shares_gpus(self) -> bool:
        """Return whether engines and trainer use the same GPUs at the same time."""
        return self.placement == "shared_gpus"

    @property
    def fetches_kv(self) -> bool:
        """Return whether an engine can get KV from a pool, the host or a prefill engine, besides its forward passes."""
        return self.kv_store is not None or self.memory.kv_offload_gib > 0 or self.prefill is not None

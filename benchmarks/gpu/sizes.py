"""The engines, workloads, bars and peer of the benchmark of the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.drive import Conversations
from hiserve.models.builtin_shapes import SHAPES
from hiserve.models.model_config import NANO

SEED = 20261121
LARGE, SMALL = "llama-8b", "qwen3-0.6b"

# Measured with vLLM 0.26.0 on the same kind of machine, Llama-3.1-8B shape; see PEER_CEILINGS.
PEER = "vLLM 0.26.0"
PEER_DATE = "2026-11-20"
# What it reaches, prompts alone: 8 of 8192 tokens at once; the conversations, with its own tier on the host.
PEER_PREFILL_TOKENS_PER_S, PEER_CONVERSATIONS_TOKENS_PER_S = 38_000, 118_000
# Of the peer's run. Its figures are scaled by our ceilings over these before they are compared.
PEER_CEILINGS = {"copy_bytes_per_s": 4.24e12, "matmul_flop_per_s": 790e12, "pinned_to_device_bytes_per_s": 55.5e9}
BARS = {
    "prefill": 0.80,
    "long prompt": 0.85,
    "graphs": 1.3,
    "overlap": 1.1,
    "peer": 1.05,
    "peer with a host tier": 1.3,
    "replays": 0.98,
    "http": 0.95,
    "crowd over http": 0.97,
    "speculation": 0.75,
    "adaptive": 0.97,
    "same tokens": 1.0,
}
# config.json of the shapes to which hiserve-nano is widened; of the smaller one every part is wider than nano's.
SPEC_SHAPES: dict[str, dict[str, Any]] = {
    LARGE: SHAPES[LARGE],
    "mini": {
        "vocab_size": 4608,
        "hidden_size": 384,
        "intermediate_size": 800,
        "num_hidden_layers": 9,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}
_NANO = {"model": NANO, "max_running_requests": 8, "max_batched_tokens": 256}


@dataclass(frozen=True)
class DecodeCase:
    """Rows that decode at once; ``context`` is at the end of what is timed, ``bar`` the least share of the bandwidth limit."""

    shape: str
    rows: int
    context: int
    bar: float


@dataclass(frozen=True)
class PeerCase:
    """Requests that all come at once, none like another; ``tokens_per_s`` is what the peer reaches, replies alone."""

    rows: int
    prompt: int
    output: int
    tokens_per_s: float


@dataclass(frozen=True)
class Chats:
    """Conversations with one beginning in common; each turn all of them send at once, and the next one follows the last reply."""

    chats: int
    turns: int
    shared: int  # tokens that all begin with
    turn_input: int
    turn_output: int
    tokens_per_s: float  # what the peer reaches, replies alone


@dataclass(frozen=True)
class HttpCase:
    """Requests over HTTP, and the same number of them offline; before the runs that count comes another one."""

    streams: int
    requests: int
    prompt: int
    output: int
    runs: int


@dataclass(frozen=True)
class SpecSizes:
    """Speculation on hiserve-nano, widened.

    Attributes:
        singles: Prompts that are answered one at a time: batch 1 is measured over all of them, each
            ``repeats_of_one`` times.
    """

    shape: str  # one of ``SPEC_SHAPES``
    settings: dict[str, Any]
    heads: dict[str, tuple[int, ...]]  # the batches of each draft head
    steps: tuple[int, ...]  # fixed numbers of drafts
    prompt: int
    output: int
    warm_output: int  # of each reply that does not count
    repeats: int  # runs that count, of each batch
    singles: int
    repeats_of_one: int  # runs that count, of each of these
    judged: int  # replies whose tokens are compared, at most

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({batch for batches in self.heads.values() for batch in batches}))


@dataclass(frozen=True)
class Sizes:
    """Everything that is measured; lengths in tokens.

    Attributes:
        decode: Cases, the one with most short rows first: later ones find its prefixes in the cache.
    """

    settings: dict[str, Any]  # of all engines
    shapes: dict[str, dict[str, Any]]  # settings of each shape's engine
    tiers: dict[str, Any]  # settings of the engine with a host tier, and of the one without that it is compared with
    host_gib: float  # of the former
    steps: int  # timed in each decode case
    warm_steps: int  # before them
    decode: tuple[DecodeCase, ...]
    long: DecodeCase  # of an engine of its own, which also computes a prompt of that length
    compare_rows: tuple[int, int]  # rows that decode with graphs and without, and with overlap and without
    prefill: tuple[int, int]  # (prompts, tokens of each)
    repeats: int
    peers: tuple[PeerCase, ...]
    chats: Chats
    conversations: Conversations  # the case of the host tier
    traffic_rows: int  # rows that decode while conversations come and go
    traffic_conversations: int  # how many of these
    http: HttpCase
    crowd: HttpCase  # likewise, of an engine with a row for each stream
    spec: SpecSizes
    max_fill_s: float  # a case whose prompts would take longer is left out


FULL = Sizes(
    settings={"load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "page_size": 16},
    shapes={
        LARGE: {"shape": LARGE, "kv_pages": 24_576, "max_running_requests": 128, "max_model_len": 9216},
        SMALL: {"shape": SMALL, "kv_pages": 12_288, "max_running_requests": 128, "max_model_len": 2048},
    },
    tiers={"kv_pages": 4096, "max_running_requests": 32, "max_model_len": 8192},
    host_gib=34.0,
    steps=64,
    warm_steps=12,
    decode=(
        DecodeCase(LARGE, 128, 1024, 0.75),
        DecodeCase(LARGE, 32, 1024, 0.75),
        DecodeCase(LARGE, 8, 1024, 0.75),
        DecodeCase(LARGE, 1, 1024, 0.75),
        DecodeCase(LARGE, 32, 8192, 0.70),
        DecodeCase(LARGE, 8, 8192, 0.70),
        DecodeCase(LARGE, 1, 8192, 0.70),
        DecodeCase(SMALL, 128, 1024, 0.55),
        DecodeCase(SMALL, 1, 1024, 0.35),
    ),
    long=DecodeCase(LARGE, 1, 32_768, 0.86),
    compare_rows=(1, 32),
    prefill=(8, 8192),
    repeats=3,
    peers=(
        PeerCase(1, 1024, 512, 194),
        PeerCase(8, 1024, 512, 1371),
        PeerCase(32, 1024, 1024, 4209),
        PeerCase(128, 1024, 256, 5519),
    ),
    chats=Chats(64, 6, 1024, 512, 64, 2529),
    conversations=Conversations(32, 4, 6144, 256, 16, 3),
    traffic_rows=8,
    traffic_conversations=16,
    http=HttpCase(32, 96, 1024, 256, 3),
    crowd=HttpCase(256, 512, 128, 256, 3),
    spec=SpecSizes(
        shape=LARGE,
        settings={
            "kv_pages": 5000,
            "max_running_requests": 128,
            "max_model_len": 512,
            "host_cache_gib": 0,
            "attention_backend": "triton",  # others compile for longer than all of this takes, and only prompts differ
        },
        heads={"eagle3": (1, 4, 16, 32, 64, 128), "mtp": (1,)},
        steps=(0, 1, 2, 3, 5),
        prompt=256,
        output=128,
        warm_output=16,
        repeats=5,
        singles=32,
        repeats_of_one=1,
        judged=16,
    ),
    max_fill_s=60.0,
)

TINY = Sizes(
    settings={"device": "cpu", "dtype": "float32", "page_size": 16, "cpu_threads": 1},
    shapes={
        LARGE: _NANO | {"kv_pages": 400, "max_model_len": 1024},
        SMALL: _NANO | {"kv_pages": 400, "max_model_len": 512},
    },
    tiers=_NANO | {"kv_pages": 64, "max_model_len": 512},
    host_gib=0.05,
    steps=16,
    warm_steps=3,
    decode=(
        DecodeCase(LARGE, 4, 64, 0.75),
        DecodeCase(LARGE, 1, 64, 0.75),
        DecodeCase(LARGE, 1, 256, 0.70),
        DecodeCase(SMALL, 1, 64, 0.35),
    ),
    long=DecodeCase(LARGE, 1, 512, 0.86),
    compare_rows=(1, 4),
    prefill=(2, 256),
    repeats=1,
    peers=(PeerCase(1, 32, 16, 194), PeerCase(4, 32, 16, 1371)),
    chats=Chats(4, 2, 32, 16, 8, 2529),
    conversations=Conversations(6, 2, 192, 32, 4, 2),
    traffic_rows=2,
    traffic_conversations=6,
    http=HttpCase(4, 8, 32, 16, 1),
    crowd=HttpCase(8, 16, 16, 16, 1),
    spec=SpecSizes(
        shape="mini",
        settings={"kv_pages": 64, "max_running_requests": 2, "max_model_len": 256, "host_cache_gib": 0},
        heads={"eagle3": (1, 2), "mtp": (1,)},
        steps=(0, 2),
        prompt=64,
        output=24,
        warm_output=4,
        repeats=1,
        singles=2,
        repeats_of_one=1,
        judged=2,
    ),
    max_fill_s=60.0,
)

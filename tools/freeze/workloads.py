"""Twenty seeded workloads of an engine on the CPU in float64, whose tokens are the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tools.freeze.device import Weather

GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.9, "top_p": 0.95, "top_k": 60}
WILD = {"temperature": 1.3, "min_p": 0.02}
PENALTIES = {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
SCORES = {"temperature": 0.6, "logprobs": 3}
PROMPT_SCORES = {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 2}
BIASED = {"temperature": 0.5, "logit_bias": {300: 4.0, 400: -100.0}, "min_tokens": 6, "stop_token_ids": (17, 300)}
NO_DRAFTS = {"temperature": 0.0, "spec": {"enabled": False}}
FEW_DRAFTS = {"temperature": 0.0, "spec": {"num_steps": 1}}
ALL_KINDS = (GREEDY, DRAWN, WILD, PENALTIES, SCORES, BIASED)

SMALL_HOST_GIB, STORE_HOST_GIB = 0.006, 0.012
BOTH = ("device", "host")
HOST = {"host_cache_gib": 0.03, "kv_canary": True}
TIGHT = {"kv_pages": 22}  # fewer pages than its rows want: they are preempted


@dataclass(frozen=True)
class Workload:
    """Conversations that come to an engine, and the events meanwhile."""

    name: str  # unique
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine, beside those that all share
    kinds: tuple[dict[str, Any], ...] = ALL_KINDS  # sampling parameters; each conversation takes the next ones
    conversations: int = 8  # how many
    turns: int = 2  # of each
    gap: int = 4  # engine steps between the openings of two conversations, in the mean
    pause: int = 6  # steps before the next turn of one, at most
    tenants: int = 1  # they take turns
    choices: int = 1  # of each prompt
    num_new: int = 16  # tokens of a reply, at most
    aborts: float = 0.0  # share of the steps before which a request is aborted
    # Steps before which tiers are flushed: step -> tiers.
    flushes: dict[int, tuple[str, ...]] = field(default_factory=dict)
    starts_early: bool = False  # rows start before their loads have arrived, as on a GPU
    is_wiped: bool = False  # the files of the store are lost once, halfway
    weather: Weather = field(default_factory=Weather)  # of the device
    is_quick: bool = False  # one of the few that every run of the tests checks


def _spec(name: str, steps: int | str) -> dict[str, Any]:
    return {"spec": name, "spec_steps": steps}


def _host(gib: float = HOST["host_cache_gib"], **settings: Any) -> dict[str, Any]:
    return HOST | {"host_cache_gib": gib} | settings


STORE = {"store": "file:", "store_prefetch": "wait"}  # each run makes the folder
LOADING = {"kv_canary": False, "kv_pages": 30}

WORKLOADS = (
    Workload("chat", {"overlap": 0, "max_batched_tokens": 24}),
    Workload("chat ahead", {"overlap": 1}, is_quick=True),
    Workload("tenants", {"overlap": 1, "eviction": "priority", "kv_pages": 60}, tenants=3),
    Workload(
        "tenants on the host", _host(SMALL_HOST_GIB, eviction="priority", kv_pages=30), tenants=3, conversations=12
    ),
    Workload("no cache", {"disable_prefix_cache": True, "overlap": 1}),
    Workload("small pages", {"page_size": 1, "kv_pages": 360, "overlap": 1}, (GREEDY, PENALTIES)),
    Workload("preempted", _host(overlap=0, host_admission="write_through_selective", **TIGHT), num_new=80, gap=2),
    Workload("preempted with drafts", {**TIGHT, "overlap": 1, **_spec("ngram", 3)}, (GREEDY, SCORES), num_new=40),
    Workload("choices", {"overlap": 1}, choices=3, conversations=5),
    Workload(
        "scores", {"overlap": 1, "kv_pages": 50, "max_batched_tokens": 40}, (SCORES, PROMPT_SCORES), conversations=6
    ),
    Workload("ngram", {"overlap": 1, **_spec("ngram", 2)}, (GREEDY, FEW_DRAFTS, NO_DRAFTS, PENALTIES)),
    Workload("ngram, chosen", {"overlap": 1, **_spec("ngram", "auto")}, num_new=30, weather=Weather(token_s=0.0004)),
    Workload("eagle3", {"overlap": 1, **_spec("eagle3", 3)}, is_quick=True),
    Workload(
        "eagle3, chosen",
        {"overlap": 0, **_spec("eagle3", "auto")},
        (GREEDY, WILD),
        num_new=60,
        weather=Weather(token_s=0.004),
    ),
    Workload("mtp on the host", _host(overlap=0, kv_pages=30, **_spec("mtp", 2))),
    Workload("mtp, chosen", {"overlap": 1, **_spec("mtp", "auto")}, num_new=30, weather=Weather(step_s=0.004)),
    Workload(
        "aborts and flushes",
        _host(overlap=1, kv_pages=40, **_spec("ngram", 2)),
        aborts=0.08,
        flushes={30: ("device",), 45: ("host",), 60: BOTH},
        conversations=12,
    ),
    Workload(
        "failed copies",
        _host(overlap=1, **LOADING),
        starts_early=True,
        conversations=8,
        gap=14,
        turns=3,
        pause=40,
        flushes=dict.fromkeys(range(30, 180, 15), ("device",)),
        weather=Weather(failing=("load", "offload"), faults=(56,), deferrals=(14, 45), token_s=0.0005),
    ),
    Workload(
        "store",
        _host(STORE_HOST_GIB, overlap=1, kv_pages=30, **STORE),
        conversations=10,
        turns=3,
        gap=16,
        pause=60,
        flushes={100: BOTH, 140: BOTH, 170: BOTH, 185: ("store",), 200: BOTH},
        is_quick=True,
    ),
    Workload(
        "store that fails",
        _host(STORE_HOST_GIB, overlap=0, **LOADING, **STORE | {"store_prefetch": "timeout"}, **_spec("eagle3", 2)),
        conversations=10,
        turns=3,
        starts_early=True,
        is_wiped=True,
        gap=16,
        pause=60,
        flushes={100: BOTH, 140: BOTH, 170: BOTH, 200: BOTH},
        weather=Weather(failing=("upload",)),
    ),
)

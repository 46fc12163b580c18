"""The forms of replies, for the documentation alone: handlers build them from what they have."""

from __future__ import annotations

from typing import Any

import msgspec

from hiserve.ipc.cache_stats import CopyStats, StoreStats, TierStats, TreeFacts


class ErrorFields(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    """Every failure."""

    error: ErrorFields


class CachedTokensDetails(msgspec.Struct):
    """Cached tokens by the tier that had them."""

    device: int
    host: int
    store: int


class CacheMiss(msgspec.Struct):
    """Why no more of a prompt was cached, and where in it that ended, in tokens."""

    reason: str
    at: int


class PromptTokensDetails(msgspec.Struct):
    """How the tokens of the prompt came about."""

    cached_tokens: int
    cached_tokens_details: CachedTokensDetails
    cache_miss: CacheMiss | None


class SpecTokensDetails(msgspec.Struct):
    """What speculation gave; accepted are tokens beyond the one that every step gives."""

    accept_length: float
    proposed: int
    accepted: int
    verify_steps: int
    accepted_per_position: list[int]


class Usage(msgspec.Struct):
    """Tokens of a reply; without speculation there is nothing to say of it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    spec_tokens_details: SpecTokensDetails | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct):
    """What the model says."""

    role: str
    content: str | None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: dict[str, Any] | None


class ChatCompletion(msgspec.Struct):
    """Reply of ``/v1/chat/completions`` that is not streamed."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(msgspec.Struct):
    """One continuation."""

    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None


class Completion(msgspec.Struct):
    """Reply of ``/v1/completions`` that is not streamed."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class Card(msgspec.Struct):
    """A served model."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(msgspec.Struct):
    """Reply of ``/v1/models``."""

    object: str
    data: list[Card]


class StorageTokensDetails(msgspec.Struct):
    """Cached tokens by the tier that had them; ``storage`` is the store."""

    device: int
    host: int
    storage: int


class MetaInfo(msgspec.Struct):
    """Everything about a reply of ``/generate`` but the reply."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: StorageTokensDetails
    cache_miss: CacheMiss | None
    weight_version: str
    spec_tokens_details: SpecTokensDetails | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct):
    """Reply of ``/generate`` to one prompt; an event of its stream has the same form."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class Tokenized(msgspec.Struct):
    """Reply of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """Reply of ``/detokenize``."""

    prompt: str


class Aborted(msgspec.Struct):
    """Reply of ``/abort_request``."""

    aborted: int


class Flushed(msgspec.Struct):
    """Reply of ``/flush_cache``."""

    flushed_pages: int


class Tiers(msgspec.Struct):
    """What each tier of one worker holds; a tier that is not there is left out. A store may be shared by workers."""

    device: TierStats
    host: TierStats | msgspec.UnsetType = msgspec.UNSET
    store: StoreStats | msgspec.UnsetType = msgspec.UNSET


class ReplicaCache(msgspec.Struct):
    """The cache of one worker in ``/cache/stats``; counts of pages, but for ``cached_tokens`` and ``misses``."""

    replica: int
    incarnation: int
    tiers: Tiers
    loads: CopyStats
    stores: CopyStats
    prefetches: CopyStats
    uploads: CopyStats
    cached_tokens: dict[str, int]
    misses: dict[str, int]
    num_unbacked: int


class Caches(msgspec.Struct):
    """Reply of ``/cache/stats``."""

    page_size: int
    replicas: list[ReplicaCache]


class Trees(msgspec.Struct):
    """Reply of ``/cache/tree``."""

    page_size: int
    replicas: list[TreeFacts]


class Health(msgspec.Struct):
    """Reply of a server that is well."""

    status: str


class ModelInfo(msgspec.Struct):
    """Reply of ``/model_info``."""

    served_model_name: str
    model_path: str
    tp_size: int
    dp_size: int
    tokenizer_path: str
    is_generation: bool
    max_model_len: int | None
    vocab_size: int
    device: str
    page_size: int
    weight_version: str


class ServerInfo(msgspec.Struct):
    """Reply of ``/server_info``."""

    version: str
    not_ready_because: str | None
    engine_error: str | None
    config: dict[str, Any]
    served_model_name: str
    model_path: str
    num_inflight: int
    num_queued: int
    workers: list[dict[str, Any]]


class Load(msgspec.Struct):
    """An entry of ``/get_load``."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class Loads(msgspec.Struct):
    """Reply of ``/v1/loads``."""

    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[dict[str, Any]]

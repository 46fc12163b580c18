"""Options of the prefix cache on its three tiers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from hiserve.config.flags import about
from hiserve.config.serving import MAX_INT32, Auto

CacheVerify = Literal["off", "store", "all"]
EvictionOrder = Literal["lru", "priority"]
KVDType = Literal["bf16", "fp8"]
StorePrefetch = Literal["best_effort", "timeout", "wait"]


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """The paged prefix cache."""

    kv_pages: Annotated[
        int | Auto,
        about(
            "Size of the device KV pool, the padding page included; auto takes a share of free memory.",
            unit="pages",
            least=2,
            most=MAX_INT32,
        ),
    ] = "auto"
    kv_dtype: Annotated[
        KVDType | Auto,
        about(
            "How all tiers keep what attention reads: bf16, in the type of the model; fp8, in 8 bits (E4M3) with scales, which takes "
            "about half of the memory and changes logits a little. auto is fp8 if the checkpoint was made for it, else bf16."
        ),
    ] = "auto"
    window_pages: Annotated[
        int | Auto,
        about(
            "Size of the device pool of layers with a window, in a model that has others too; 0 keeps their pages as long as "
            "the others'. auto is 0 with --kv-canary, else a share of --kv-pages.",
            unit="pages",
            least=0,
            most=MAX_INT32,
            is_debug=True,
        ),
    ] = "auto"
    tail_share: Annotated[
        float | Auto,
        about(
            "Share of layers with a window and of snapshots in the memory of the device pools; auto goes by the bytes of a tail, "
            "what a request needs of them to resume at a boundary, beside those of the history of 1,500 tokens.",
            unit="share",
            least=0.01,
            most=0.99,
            is_debug=True,
        ),
    ] = "auto"
    tail_every: Annotated[
        int | Auto,
        about(
            "Distance of the boundaries within a prompt at which a later request can resume, rounded up to whole pages; 0 keeps "
            "its end and branches alone. auto is 8 times the tokens whose history takes as many bytes as a tail.",
            unit="tokens",
            least=0,
            most=MAX_INT32,
            is_debug=True,
        ),
    ] = "auto"
    page_size: Annotated[
        int | Auto,
        about(
            "Tokens per page; prefixes are shared in whole pages. auto is 16, 64 for models with recurrent states, and 128 for models whose rows stand for several "
            "tokens.",
            unit="tokens",
            least=1,
            most=MAX_INT32,
        ),
    ] = "auto"
    host_cache_gib: Annotated[
        float | Auto,
        about(
            "Host memory of each worker for prefixes evicted from the device, 0 for none; auto takes a share of the free "
            "memory, or keeps the size of the segment that --host-cache-name names.",
            unit="GiB",
            least=0,
            most=65_536,
        ),
    ] = "auto"
    host_cache_name: Annotated[
        str | None,
        about(
            "Keep the host cache in /dev/shm under this name, for the next server; the default is memory that is freed "
            "with the server."
        ),
    ] = None
    cache_verify: Annotated[
        CacheVerify,
        about(
            "When host pages are checked against their checksums: store, once if a former server left them; all, "
            "whenever they are loaded; or off, never. Pages from --store are always checked.",
            is_debug=True,
        ),
    ] = "store"
    host_admission: Annotated[
        Literal["write_through", "write_through_selective"],
        about("Which prefixes the host keeps: all, or those that a second request used.", is_debug=True),
    ] = "write_through"
    eviction: Annotated[
        EvictionOrder,
        about(
            "Order of eviction: lru, least recently used pages first; priority, pages of requests of low priority first.",
            is_debug=True,
        ),
    ] = "lru"
    disable_prefix_cache: Annotated[
        bool,
        about("Share no prefixes between requests, to measure the gain of sharing.", is_debug=True),
    ] = False
    store: Annotated[
        str | None,
        about(
            "Keep cached prefixes beyond the host cache too, where they outlive the server: file:DIR is a directory, made "
            "if missing and closed to other users, which replicas and servers may share; valkey://HOST:PORT is a Valkey server, for "
            "servers of several hosts (valkeys:// with TLS; several are separated by commas; ?password_file=PATH&ca_file=PATH)."
        ),
    ] = None
    store_secret_file: Annotated[
        str | None,
        about(
            "File with the secret of the servers that share a store on the network, at least 32 bytes that its user alone can "
            "read: they take no pages from a server without it."
        ),
    ] = None
    store_timeout_s: Annotated[
        float,
        about(
            "Longest a call of a store on the network takes, for up to 4 MiB. After three failures it is left alone for 5 s.",
            unit="s",
            least=0.05,
            most=60,
            is_debug=True,
        ),
    ] = 2.0
    store_gib: Annotated[
        float,
        about(
            "Most that the store may hold, if it is a directory; the pages used longest ago go first.",
            unit="GiB",
            least=0.001,
            most=1_048_576,
        ),
    ] = 64.0
    store_prefetch: Annotated[
        StorePrefetch,
        about(
            "How long a request waits for its prefix from the store: timeout, up to --store-prefetch-timeout-s; wait, "
            "until it has arrived; best_effort, not at all: it uses the pages that arrived before its admission.",
            is_debug=True,
        ),
    ] = "timeout"
    store_prefetch_timeout_s: Annotated[
        float, about("Longest a request waits for the store, from its arrival.", unit="s", least=0, most=3600)
    ] = 1.0
    kv_canary: Annotated[
        bool,
        about(
            "Store token and position in each slot of a page, and stop when a request reads different ones.",
            is_debug=True,
        ),
    ] = False
    kv_events: Annotated[
        str | None,
        about(
            "Publish changes of the cached prefixes for routers, on a ZeroMQ PUB socket at this endpoint (tcp://*:5557, "
            "ipc://PATH); each replica has the next port, or path-NUMBER. ?topic=TEXT after it names the topic: llm-d reads "
            "kv@ADDRESS:PORT@MODEL alone, where it sends requests."
        ),
    ] = None
    kv_events_replay: Annotated[str | None, about("Endpoint where routers request missed KV events.")] = None

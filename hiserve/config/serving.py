"""Options of the server and of how many workers it has; sections of ``Options``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from hiserve.config.flags import about

Auto = Literal["auto"]
MAX_INT32 = 2**31 - 1  # pages, rows and lengths travel as int32
# The names of text/reader/formats.py.
ReplyFormatName = Literal[
    "auto", "none", "thoughts", "harmony", "hermes", "llama3_json", "mistral_list", "mistral", "qwen3_coder", "glm", "deepseek_v3", "deepseek",
    "deepseek_v32", "deepseek_v4", "kimi_k2", "minimax",
]  # fmt: skip


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers."""

    replicas: Annotated[
        int,
        about(
            "Workers under one scheduler, each with a copy of the model and its own cache.",
            unit="workers",
            least=1,
            most=1024,
        ),
    ] = 1
    tp: Annotated[
        int,
        about(
            "Devices of each replica, which compute every layer together (tensor parallelism): for models that do not fit on one "
            "device, and for latency. On cpu processes.",
            unit="devices",
            least=1,
            most=64,
        ),
    ] = 1
    exchange: Annotated[
        Literal["auto", "nccl"],
        about(
            "How the GPUs of --tp add their parts of up to 128 rows: auto writes into each other's memory where the devices map it, and "
            "nccl, which adds all others, adds these too. On cpu it is gloo.",
            is_debug=True,
        ),
    ] = "nccl"
    devices: Annotated[
        str | None,
        about(
            "CUDA devices of the replicas, by number: with 2,3 the first runs on device 2 and the second on 3, and with --tp 2 one "
            "replica on both; the default is the first devices, as many as all replicas have."
        ),
    ] = None

    @property
    def num_ranks(self) -> int:
        """Processes that compute, those of all replicas; each has a device of its own on cuda."""
        return self.replicas * self.tp


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP surface and logging."""

    host: Annotated[str, about("Address to listen on.", is_http=True)] = "127.0.0.1"
    port: Annotated[int, about("TCP port to listen on; 0 picks a free one.", least=0, most=65_535, is_http=True)] = 8000
    served_model_name: Annotated[
        str | None, about("Name clients use for the model; the default is the folder's name.")
    ] = None
    api_key: Annotated[
        tuple[str, ...],
        about(
            "Key that requests must carry; may be given several times, for as many tenants.",
            repeats=True,
            is_secret=True,
            is_http=True,
        ),
    ] = ()
    admin_api_key: Annotated[
        str | None,
        about(
            "Key for operations on all tenants: flushing, aborting all, server information.",
            is_secret=True,
            is_http=True,
        ),
    ] = None
    metrics_key: Annotated[
        str | None,
        about(
            "Key for all of /metrics, as the admin key is; with API keys, other callers see only metrics that are not about "
            "requests.",
            is_secret=True,
            is_http=True,
        ),
    ] = None
    seal_key: Annotated[
        str | None,
        about(
            "Secret that seals the thoughts of replies, so that they come back unchanged, and draws the seeds of requests without "
            "one by their x-request-id; the default is a new one at each start. Servers that share clients need the same.",
            is_secret=True,
        ),
    ] = None
    responses_store: Annotated[
        str,
        about(
            "Where responses are kept that clients continue by their id: memory, off, or sqlite:PATH, a file that outlives the "
            "server. They take 64 MiB at most, and are forgotten an hour after their last use.",
            is_http=True,
        ),
    ] = "memory"
    keep_volatile: Annotated[
        bool,
        about(
            "Show the model the billing header that Claude Code puts before its system prompt; it differs between sessions, "
            "which then share no prefix."
        ),
    ] = False
    share_prefixes: Annotated[
        bool, about("All API keys share cached prefixes; otherwise each has its own cache.", is_http=True)
    ] = False
    max_request_bytes: Annotated[
        int | Auto,
        about(
            "Largest body of a request; larger ones are refused with 413. auto is 32 bytes for each token of the context, "
            "and at least 8 MiB.",
            unit="bytes",
            least=1,
            most=MAX_INT32,
        ),
    ] = "auto"
    strict_fields: Annotated[
        bool, about("Refuse request fields that hiserve does not know, which it ignores otherwise.", is_debug=True)
    ] = False
    drain_timeout_s: Annotated[
        float,
        about(
            "Time for open requests to finish when the server stops, and then for cached pages to reach the store, or the "
            "named host cache.",
            unit="s",
            least=0,
            most=86_400,
        ),
    ] = 30.0
    otel_endpoint: Annotated[
        str | None,
        about(
            "URL of an OpenTelemetry collector, such as http://localhost:4318, which gets a trace of each request by OTLP over "
            "HTTP. Headers, sampling and the service's name are given by the SDK's OTEL_ variables. Needs the extra otel."
        ),
    ] = None
    metrics_compat: Annotated[
        Literal["none", "vllm", "sglang"],
        about("Show metrics under another engine's names too.", is_debug=True, is_http=True),
    ] = "none"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], about("Least severe messages to log.", is_http=True)
    ] = "info"
    debug: Annotated[bool, about("Show tracebacks for errors that are normally one line.")] = False

"""The options of ``hiserve bench``, in sections; a field's name is its flag, its description its help. Sizes fit the model."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_type_hints

import msgspec

from hiserve.config.flags import about, flags_of

SYNTHETIC = ("random", "shared-prefix", "conversation-trace")
FITTING = 0  # a size that the user left open: see ``filled``
_T = TypeVar("_T")

ApiKeyFile: TypeAlias = Annotated[Path | None, about("File that holds the server's API key, or better its admin key.")]
Recording: TypeAlias = Annotated[
    Path | None, about("File of a recording: JSON lines, gzipped if its name ends with .gz.")
]
MostPrompts: TypeAlias = Annotated[int | None, about("Most requests; the default is all.", unit="requests", least=1)]
Speed: TypeAlias = Annotated[
    float, about("How many times faster than recorded a file is sent; inf sends as fast as replies come.", above=0)
]
OutputLength: TypeAlias = Annotated[int, about("Length of a reply.", unit="tokens", least=1)]
RecordedLength: TypeAlias = Annotated[
    int | None, about("Length of a reply; the default is as recorded where there is a record.", unit="tokens", least=1)
]
RangeRatio: TypeAlias = Annotated[
    float,
    about(
        "Lengths are drawn from length x (1 - ratio) to length x (1 + ratio), as in vLLM: 0.0 is exactly the length "
        "(SGLang's 1.0).",
        least=0,
        most=1,
    ),
]
Temperature: TypeAlias = Annotated[float, about("Sampling temperature; 0 is greedy.", least=0)]
Timeout: TypeAlias = Annotated[float, about("Longest time for one request.", unit="s", above=0)]
Seed: TypeAlias = Annotated[int, about("Seed of everything that is drawn.", least=0)]
Fault = Literal["kill-worker", "hang-worker", "kill-scheduler", "flip-host", "flip-store"]
Sizes = Mapping[str, int]
SHARED_PREFIX_OUTPUT = 256


class ConnectionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and the fields that every request has."""

    url: Annotated[str, about("Address of the server.")] = "http://127.0.0.1:8000"
    backend: Annotated[
        Literal["openai", "openai-chat", "generate"] | None,
        about("Route: completions, chat completions, or SGLang's /generate; the default suits the data set."),
    ] = None
    model_name: Annotated[str | None, about("One of the server's models; the default is the first.")] = None
    api_key_file: ApiKeyFile = None
    tokenizer: Annotated[
        Path | None, about("Folder with the model's tokenizer.json, to count tokens; without it the server is asked.")
    ] = None
    vocab_size: Annotated[
        int | None, about("Drawn token ids are below it; the default is the server's.", unit="tokens", least=1)
    ] = None
    temperature: Temperature = 0.0
    ignore_eos: Annotated[
        bool | None, about("Generate whole lengths, past the model's end; the default does for made-up prompts only.")
    ] = None
    timeout: Timeout = 3600.0


class DataOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The requests; each data set uses some of the fields, and sizes that are not given fit the model and its device."""

    dataset: Annotated[
        Literal["random", "shared-prefix", "conversation-trace", "chats", "agent-sessions"], about("The requests.")
    ] = "random"
    path: Recording = None
    num_prompts: MostPrompts = None
    input_length: Annotated[int, about("Length of a random prompt.", unit="tokens", least=1)] = FITTING
    output_length: RecordedLength = None
    random_range_ratio: RangeRatio = 0.0
    num_groups: Annotated[int, about("Shared prefixes.", least=1)] = FITTING
    prompts_per_group: Annotated[int, about("Requests for each shared prefix.", unit="requests", least=1)] = FITTING
    system_length: Annotated[int, about("Length of a shared prefix.", unit="tokens", least=1)] = FITTING
    question_length: Annotated[int, about("Length after a shared prefix.", unit="tokens", least=1)] = FITTING
    speed: Speed = 1.0
    block_tokens: Annotated[
        int, about("Length of a block of the conversation trace; less than 512 shrinks prompts and replies.", least=1)
    ] = 512


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals."""

    request_rate: Annotated[float, about("Requests offered; inf sends all at once.", unit="requests/s", above=0)] = (
        float("inf")
    )
    burstiness: Annotated[float, about("Shape of the gamma distribution of gaps: 1 is Poisson.", above=0)] = 1.0


class LimitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of every run against a server."""

    max_concurrency: Annotated[int | None, about("Most requests in flight.", unit="requests", least=1)] = None
    seed: Seed = 42
    flush_cache: Annotated[
        bool,
        about(
            "Empty the server's prefix cache, but for its store, before the run; the same seed sends the same prompts, "
            "which an earlier run may have left there."
        ),
    ] = False


class MultiturnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A closed loop of chats; sizes that are not given fit the model and its device."""

    num_clients: Annotated[int, about("Chats at once.", least=1)] = FITTING
    num_rounds: Annotated[int, about("Requests of each chat.", unit="requests", least=1)] = FITTING
    shared_length: Annotated[
        int, about("Tokens that all chats begin with; the default is none.", unit="tokens", least=0)
    ] = 0
    request_length: Annotated[int, about("New tokens of each request.", unit="tokens", least=1)] = FITTING
    output_length: OutputLength = FITTING
    think_time: Annotated[float, about("Time between a reply and the next request.", unit="s", least=0)] = 0.0


class OfflineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Random prompts for the offline API, all given at once; sizes that are not given fit the model and its device."""

    num_prompts: Annotated[int, about("Prompts.", least=1)] = FITTING
    input_length: Annotated[int, about("Length of a prompt.", unit="tokens", least=1)] = FITTING
    output_length: OutputLength = FITTING
    random_range_ratio: RangeRatio = 0.0
    temperature: Temperature = 0.0
    seed: Seed = 42
    in_process: Annotated[bool, about("Run the engine in this process, without scheduler and worker.")] = False


class CacheLoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The load on the cache; each uses some of the fields, and sizes that are not given fit the model and its device."""

    load: Annotated[
        Literal["multi-turn", "conversation-trace", "agent-sessions", "shared-prefix"],
        about(
            "The requests: multi-turn, made-up conversations; conversation-trace or agent-sessions, a recording "
            "(--path); shared-prefix, made-up prompts that share prefixes."
        ),
    ] = "multi-turn"
    path: Recording = None
    num_prompts: MostPrompts = None
    speed: Speed = 1.0
    length_scale: Annotated[
        float,
        about(
            "Lengths are multiplied by it, so that a load fits a smaller context: those of prompts and recorded replies, "
            "of the blocks of the trace, and of each paragraph of recorded sessions.",
            above=0,
            most=1,
        ),
    ] = 1.0
    num_conversations: Annotated[int, about("Conversations of multi-turn.", least=1)] = FITTING
    group_size: Annotated[int, about("Conversations at once; the next group follows the last reply.", least=1)] = (
        FITTING
    )
    num_rounds: Annotated[int, about("Requests of each conversation.", unit="requests", least=1)] = FITTING
    conversation_length: Annotated[int, about("Length of its first request.", unit="tokens", least=1)] = FITTING
    request_length: Annotated[int, about("New tokens of each later one.", unit="tokens", least=1)] = FITTING
    num_prefixes: Annotated[int, about("Shared prefixes.", least=1)] = FITTING
    suffixes_per_prefix: Annotated[int, about("Requests for each of them.", unit="requests", least=1)] = FITTING
    prefix_length: Annotated[int, about("Length of a shared prefix.", unit="tokens", least=1)] = FITTING
    suffix_length: Annotated[int, about("Length after a shared prefix.", unit="tokens", least=1)] = FITTING
    output_length: RecordedLength = None
    num_tenants: Annotated[
        int,
        about("Conversations are dealt out to tenants (cache salts), which share nothing; 1 sends no salt.", least=1),
    ] = 1
    tokens_per_page: Annotated[
        int | None, about("Page size of the endless cache; the default is the server's own.", unit="tokens", least=1)
    ] = None


class SweepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The cases of speculation; every one of a list with every one of the others."""

    proposers: Annotated[
        tuple[str, ...], about("As for --spec; the default is --spec, or the head that came with the model.")
    ] = ()
    steps: Annotated[
        tuple[str, ...],
        about(
            "Drafts of a step; auto chooses for each step the number that pays, and trees also among trees; a shape as of --spec-tree, such as "
            "3x6:16, is a tree."
        ),
    ] = (
        "0",
        "3",
        "auto",
    )
    batches: Annotated[tuple[int, ...], about("Requests at once.", unit="requests", least=1, most=4096)] = (1, 4)
    temperatures: Annotated[tuple[float, ...], about("Sampling temperatures; 0 is greedy.", least=0, most=100)] = (0.0,)
    sources: Annotated[
        tuple[Literal["cold", "device", "host"], ...],
        about("Tier of the prompts: none, the cache on the device, or on the host."),
    ] = ("cold", "host")
    dataset: Annotated[
        Literal["held-out", "chats", "agent-sessions"],
        about("Prompts: dialogues that come along, which the embedded model never saw; those of a file (--path)."),
    ] = "held-out"
    path: Recording = None
    prompt_length: Annotated[int, about("Longer prompts lose their beginnings.", unit="tokens", least=2)] = 256
    output_length: Annotated[int, about("Length of each reply, past the model's end.", unit="tokens", least=2)] = 48
    repeats: Annotated[int, about("Runs of each case, in turns with plain decoding; shows medians.", least=1)] = 3


class RehearsalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Rehearsed drafts, right with a given probability at the cost of a head, whatever the weights."""

    sweep: Annotated[
        bool,
        about("Measure speculation by concurrency and acceptance with rehearsed drafts, instead of the cases above."),
    ] = False
    acceptances: Annotated[tuple[float, ...], about("Probabilities that a draft is right.", least=0, most=1)] = (
        0.0,
        0.27,
        0.7,
    )
    concurrency: Annotated[
        tuple[int, ...],
        about("Requests at once; the default is 1 4 8 16 32, on a CPU 1 4.", unit="requests", least=1, most=4096),
    ] = ()


class SoakOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a soak, and its faults."""

    url: Annotated[
        str | None, about("Address of a running server; without it one is started, of these settings, with faults.")
    ] = None
    api_key_file: ApiKeyFile = None
    duration: Annotated[float, about("Time under load, after replies were recorded.", unit="s", above=0)] = 60.0
    users: Annotated[int, about("Conversations at once.", least=1)] = 6
    num_dialogues: Annotated[int, about("Dialogues, which come along.", least=1)] = 8
    num_agents: Annotated[int, about("Agents, which share a long prefix of made-up tokens.", least=1)] = 4
    num_turns: Annotated[int, about("Requests of each, at most.", unit="requests", least=1)] = 4
    prefix_length: Annotated[int, about("Length of the prefix that agents share.", unit="tokens", least=1)] = 256
    turn_length: Annotated[int, about("New tokens of each turn of an agent.", unit="tokens", least=1)] = 48
    output_length: Annotated[int, about("Longest reply.", unit="tokens", least=2)] = 32
    cancelled: Annotated[float, about("Share of requests whose users leave before the end.", least=0, most=1)] = 0.15
    slow: Annotated[float, about("Share of replies that are read slowly.", least=0, most=1)] = 0.05
    bad: Annotated[float, about("Malformed requests beside each good one.", least=0, most=1)] = 0.1
    burst_size: Annotated[int, about("Requests that come at once in a burst; 0 for no bursts.", least=0)] = 48
    burst_every: Annotated[float, about("Time between bursts.", unit="s", above=0)] = 15.0
    faults: Annotated[
        tuple[Fault, ...],
        about(
            "Faults of a server that was started here: kill-worker and kill-scheduler (SIGKILL), hang-worker (SIGSTOP; "
            "--step-timeout-s), flip-host and flip-store (a bit of cached pages; --cache-verify all, --store); the "
            "default is all that the settings allow."
        ),
    ] = ()
    fault_every: Annotated[float, about("Mean time from a recovery to the next fault.", unit="s", above=0)] = 10.0
    recovery_limit: Annotated[float, about("Longest time from a fault to a new token.", unit="s", above=0)] = 60.0
    memory_limit: Annotated[
        float, about("Most that a process may grow in ten minutes or more after its warm-up.", unit="MiB/min", above=0)
    ] = 1.0
    same_tokens: Annotated[
        bool | None,
        about(
            "Replies must be those recorded, token by token; the default does for servers in float64 or with --exact."
        ),
    ] = None
    timeout: Timeout = 120.0
    seed: Seed = 42


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Results besides the terminal's."""

    output: Annotated[Path | None, about("Write figures and raw samples to this JSON file.")] = None


class PlotOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures of a run."""

    plot: Annotated[Path | None, about("Draw the run into this PNG, SVG or PDF file; needs hiserve[bench].")] = None


class GoodputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives."""

    goodput: Annotated[
        tuple[str, ...], about("Count requests that meet all of these, in milliseconds: ttft:200 tpot:50 e2e:5000.")
    ] = ()


def add_flags(parser: argparse.ArgumentParser, *sections: type[msgspec.Struct]) -> None:
    for section in sections:
        group = parser.add_argument_group((section.__doc__ or "").rstrip("."))
        for flag in flags_of("bench", section).values():
            flag.add_to(group)


def pick(section: type[_T], arguments: Mapping[str, Any]) -> _T:
    given = {name: arguments[name] for name in get_type_hints(section) if arguments[name] is not None}
    return section(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


_Sized = TypeVar("_Sized", DataOptions, MultiturnOptions, OfflineOptions, CacheLoadOptions)

# By section: sizes for accelerators, and for a CPU.
SIZES: dict[type[msgspec.Struct], dict[str, tuple[int, int]]] = {
    DataOptions: {
        "num_prompts": (1000, 64),
        "input_length": (1024, 128),
        "output_length": (1024, 64),
        "num_groups": (64, 8),
        "prompts_per_group": (16, 8),
        "system_length": (2048, 512),
        "question_length": (128, 32),
    },
    MultiturnOptions: {
        "num_clients": (80, 8),
        "num_rounds": (10, 4),
        "request_length": (2048, 256),
        "output_length": (1, 8),
    },
    OfflineOptions: {"num_prompts": (256, 64), "input_length": (1024, 128), "output_length": (128, 64)},
    CacheLoadOptions: {
        "num_conversations": (32, 16),
        "group_size": (4, 4),
        "num_rounds": (4, 3),
        "conversation_length": (6144, 512),
        "request_length": (256, 64),
        "num_prefixes": (64, 8),
        "suffixes_per_prefix": (16, 8),
        "prefix_length": (2048, 512),
        "suffix_length": (128, 32),
        "output_length": (16, 16),
    },
}


def filled(options: _Sized, *, device: str | None, max_model_len: int | None) -> _Sized:
    """Returns the options with a size in each place that the user left open.

    Lengths that the user left open shrink, all by one factor, until the longest request fits the context; lengths
    that were given stay as they are.
    """
    if _is_recorded(options):
        return options
    sizes = _sizes(options, device == "cpu")
    given = {name: value for name in sizes if (value := getattr(options, name)) not in (None, FITTING)}
    free_sizes = {name: size for name, size in sizes.items() if name not in given}
    weights = _weights(options, {**free_sizes, **given})
    if max_model_len is not None:
        used = sum(math.ceil(weight * given.get(name, 1)) + weight % 1 for name, weight in weights.items())
        wanted = sum(weight * (free_sizes[name] - 1) for name, weight in weights.items() if name in free_sizes)
        factor = min(1.0, max(0.0, max_model_len - used) / max(wanted, 1e-9))
        free_sizes |= {name: 1 + int((free_sizes[name] - 1) * factor) for name in weights if name in free_sizes}
    return msgspec.structs.replace(options, **free_sizes)


def chosen(size: int | None) -> int:
    """Returns a size that ``filled`` has filled in."""
    assert size, f"a size is still {size}: the options were not filled in"
    return size


def _is_recorded(options: msgspec.Struct) -> bool:
    if isinstance(options, DataOptions):
        return options.dataset not in ("random", "shared-prefix")
    return isinstance(options, CacheLoadOptions) and options.load in ("conversation-trace", "agent-sessions")


def _sizes(options: msgspec.Struct, is_small: bool) -> Sizes:
    sizes = {name: both[is_small] for name, both in SIZES[type(options)].items()}
    if isinstance(options, DataOptions) and options.dataset == "shared-prefix":
        del sizes["num_prompts"]  # all there are
        sizes["output_length"] = min(SHARED_PREFIX_OUTPUT, sizes["output_length"])
    return sizes


def _weights(options: msgspec.Struct, sizes: Sizes) -> dict[str, float]:
    """Returns how often each length counts in the longest request."""
    if isinstance(options, MultiturnOptions):
        return dict.fromkeys(("request_length", "output_length"), float(sizes["num_rounds"]))
    if isinstance(options, CacheLoadOptions):
        rounds, scale = sizes["num_rounds"], options.length_scale
        if options.load == "multi-turn":
            lengths = {"conversation_length": scale, "request_length": (rounds - 1) * scale}
            return lengths | {"output_length": float(rounds)}
        return {"prefix_length": scale, "suffix_length": scale, "output_length": 1.0}
    assert isinstance(options, DataOptions | OfflineOptions), f"sizes of {options} have no weights"
    if isinstance(options, DataOptions) and options.dataset == "shared-prefix":
        return dict.fromkeys(("system_length", "question_length", "output_length"), 1.0)
    # Random lengths are rounded up at the far end of their range.
    return dict.fromkeys(("input_length", "output_length"), 1.0 + options.random_range_ratio)

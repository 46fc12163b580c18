"""What the user of ``hiserve bench`` chose, in sections; a field's name is its flag, its description its help."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec

from hiserve.config.flags import about, flags_of

Dataset = Literal["random", "shared-prefix", "conversation-trace", "chats", "agent-sessions"]
SYNTHETIC = ("random", "shared-prefix", "conversation-trace")
# A size that the user left open: see ``bench.defaults``.
FITTING = 0
_T = TypeVar("_T")


class ConnectionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which server, and what every request says."""

    url: Annotated[str, about("Address of the server.")] = "http://127.0.0.1:8000"
    backend: Annotated[
        Literal["openai", "openai-chat", "generate"] | None,
        about(
            "Route of requests: completions, chat completions, or SGLang's /generate; the default suits the data set."
        ),
    ] = None
    model_name: Annotated[str | None, about("Which of the server's models; the default is the first.")] = None
    api_key_file: Annotated[Path | None, about("File that holds the server's API key.")] = None
    tokenizer: Annotated[
        Path | None, about("Folder with the model's tokenizer.json, to count tokens; without it the server is asked.")
    ] = None
    vocab_size: Annotated[
        int | None,
        about("Token ids that are drawn are below it; the default is what the server tells.", unit="tokens", least=1),
    ] = None
    temperature: Annotated[float, about("Sampling temperature; 0 is greedy.", least=0)] = 0.0
    ignore_eos: Annotated[
        bool | None, about("Generate whole lengths whatever the model says; the default does for made-up prompts only.")
    ] = None
    timeout: Annotated[float, about("Longest time for one request.", unit="s", above=0)] = 3600.0


class DataOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to send; each data set uses the fields it has a use for, and sizes that are not given fit the model and its device."""

    dataset: Annotated[Dataset, about("What to send.")] = "random"
    path: Annotated[
        Path | None, about("File of a trace or recording: JSON lines, gzipped if its name ends with .gz.")
    ] = None
    num_prompts: Annotated[
        int | None,
        about("Most requests; the default is all there are, or random ones.", unit="requests", least=1),
    ] = None
    input_length: Annotated[int, about("Length of a random prompt.", unit="tokens", least=1)] = FITTING
    output_length: Annotated[
        int | None,
        about(
            "Length of a reply; the default is as recorded where there is a record.",
            unit="tokens",
            least=1,
        ),
    ] = None
    random_range_ratio: Annotated[
        float,
        about(
            "Random lengths are drawn from length x (1 - ratio) to length x (1 + ratio), as in vLLM: 0.0 is exactly "
            "the length (SGLang's 1.0).",
            least=0,
            most=1,
        ),
    ] = 0.0
    num_groups: Annotated[int, about("Shared prefixes.", least=1)] = FITTING
    prompts_per_group: Annotated[int, about("Requests for each shared prefix.", unit="requests", least=1)] = FITTING
    system_length: Annotated[int, about("Length of a shared prefix.", unit="tokens", least=1)] = FITTING
    question_length: Annotated[int, about("Length of what follows a shared prefix.", unit="tokens", least=1)] = FITTING
    speed: Annotated[
        float, about("How many times faster than recorded a trace is sent; inf sends as fast as replies come.", above=0)
    ] = 1.0
    block_tokens: Annotated[
        int,
        about("Length of a block of the conversation trace; less than 512 shrinks prompts and replies.", least=1),
    ] = 512


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to send it."""

    request_rate: Annotated[float, about("Requests offered; inf sends all at once.", unit="requests/s", above=0)] = (
        float("inf")
    )
    burstiness: Annotated[
        float, about("Shape of the gamma distribution of gaps: 1 is Poisson, less is burstier.", above=0)
    ] = 1.0


class LimitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for every run against a server."""

    max_concurrency: Annotated[int | None, about("Most requests in flight.", unit="requests", least=1)] = None
    seed: Annotated[int, about("Seed of everything that is drawn.", least=0)] = 42
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
    request_length: Annotated[int, about("New tokens of each request.", unit="tokens", least=1)] = FITTING
    output_length: Annotated[int, about("Length of each reply.", unit="tokens", least=1)] = FITTING
    think_time: Annotated[float, about("Time between a reply and the next request.", unit="s", least=0)] = 0.0


class OfflineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Random prompts for the offline API, all given at once; sizes that are not given fit the model and its device."""

    num_prompts: Annotated[int, about("Prompts.", least=1)] = FITTING
    input_length: Annotated[int, about("Length of a prompt.", unit="tokens", least=1)] = FITTING
    output_length: Annotated[int, about("Length of a reply.", unit="tokens", least=1)] = FITTING
    random_range_ratio: Annotated[
        float,
        about(
            "Lengths are drawn from length x (1 - ratio) to length x (1 + ratio); 0.0 is exactly the length.",
            least=0,
            most=1,
        ),
    ] = 0.0
    temperature: Annotated[float, about("Sampling temperature; 0 is greedy.", least=0)] = 0.0
    seed: Annotated[int, about("Seed of everything that is drawn.", least=0)] = 42
    in_process: Annotated[bool, about("Run the engine in this process, without scheduler and worker processes.")] = (
        False
    )


class CacheLoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask of the cache; each load uses the fields it has a use for, and sizes that are not given fit the model and its device."""

    load: Annotated[
        Literal["multi-turn", "conversation-trace", "agent-sessions", "shared-prefix"],
        about(
            "What is sent: multi-turn, made-up conversations; conversation-trace or agent-sessions, a recording "
            "(--path); shared-prefix, made-up prompts that share prefixes."
        ),
    ] = "multi-turn"
    path: Annotated[
        Path | None, about("File of a trace or recording: JSON lines, gzipped if its name ends with .gz.")
    ] = None
    num_prompts: Annotated[
        int | None,
        about("Most requests of a file or of shared prefixes; the default is all.", unit="requests", least=1),
    ] = None
    speed: Annotated[
        float, about("How many times faster than recorded a file is sent; inf sends as fast as replies come.", above=0)
    ] = 1.0
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
    group_size: Annotated[
        int, about("Conversations visited at once; the next group follows the last reply.", least=1)
    ] = FITTING
    num_rounds: Annotated[int, about("Requests of each conversation.", unit="requests", least=1)] = FITTING
    conversation_length: Annotated[int, about("Length of a conversation's first request.", unit="tokens", least=1)] = (
        FITTING
    )
    request_length: Annotated[int, about("New tokens of each later one.", unit="tokens", least=1)] = FITTING
    num_prefixes: Annotated[int, about("Shared prefixes.", least=1)] = FITTING
    suffixes_per_prefix: Annotated[int, about("Requests for each of them.", unit="requests", least=1)] = FITTING
    prefix_length: Annotated[int, about("Length of a shared prefix.", unit="tokens", least=1)] = FITTING
    suffix_length: Annotated[int, about("Length of what follows it.", unit="tokens", least=1)] = FITTING
    output_length: Annotated[
        int | None,
        about(
            "Length of a reply, whatever the scale; the default is as recorded where there is a record.",
            unit="tokens",
            least=1,
        ),
    ] = None
    num_tenants: Annotated[
        int,
        about(
            "Conversations are dealt out to so many tenants (cache salts), which share nothing; 1 sends no salt.",
            least=1,
        ),
    ] = 1
    tokens_per_page: Annotated[
        int | None,
        about(
            "Page size of the endless cache that the server is compared with; the default is the server's own.",
            unit="tokens",
            least=1,
        ),
    ] = None


class SweepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What speculation is measured with; every one of a list with every one of the others."""

    proposers: Annotated[
        tuple[str, ...],
        about("Who proposes, as for --spec; the default is --spec, or the head that came with the model."),
    ] = ()
    steps: Annotated[
        tuple[str, ...], about("Tokens proposed for each that the model draws; auto chooses for each step what pays.")
    ] = ("0", "3", "auto")
    batches: Annotated[tuple[int, ...], about("Requests at once.", unit="requests", least=1, most=4096)] = (1, 4)
    temperatures: Annotated[tuple[float, ...], about("Sampling temperatures; 0 is greedy.", least=0, most=100)] = (0.0,)
    sources: Annotated[
        tuple[Literal["cold", "device", "host"], ...],
        about("Where prompts are found: nowhere, in the cache on the device, or on the host."),
    ] = ("cold", "host")
    dataset: Annotated[
        Literal["held-out", "chats", "agent-sessions"],
        about("Prompts: dialogues that come along, which the embedded model never saw; those of a file (--path)."),
    ] = "held-out"
    path: Annotated[
        Path | None, about("File of chats or agent sessions: JSON lines, gzipped if its name ends with .gz.")
    ] = None
    prompt_length: Annotated[int, about("Longer prompts lose their beginnings.", unit="tokens", least=2)] = 256
    output_length: Annotated[int, about("Length of each reply, whatever the model says.", unit="tokens", least=2)] = 48
    repeats: Annotated[int, about("Runs of each case, in turns with plain decoding; medians are told.", least=1)] = 3


Fault = Literal["kill-worker", "hang-worker", "kill-scheduler", "flip-host", "flip-store"]


class SoakOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has to live through."""

    url: Annotated[
        str | None,
        about("Address of a running server; without it one is started, of the settings given, and faults strike it."),
    ] = None
    api_key_file: Annotated[Path | None, about("File that holds its API key, or better its admin key.")] = None
    duration: Annotated[
        float, about("Time under load, the recording of replies before it not included.", unit="s", above=0)
    ] = 60.0
    users: Annotated[int, about("Conversations at once.", least=1)] = 6
    num_dialogues: Annotated[int, about("Dialogues, which come along.", least=1)] = 8
    num_agents: Annotated[int, about("Agents, which share a long prefix of made-up tokens.", least=1)] = 4
    num_turns: Annotated[int, about("Requests of each, at most.", unit="requests", least=1)] = 4
    prefix_length: Annotated[int, about("What agents share.", unit="tokens", least=1)] = 256
    turn_length: Annotated[int, about("What is new in each turn of an agent.", unit="tokens", least=1)] = 48
    output_length: Annotated[int, about("Longest reply.", unit="tokens", least=2)] = 32
    cancelled: Annotated[float, about("Share of requests whose users leave before the end.", least=0, most=1)] = 0.15
    slow: Annotated[float, about("Share of replies that are read slowly.", least=0, most=1)] = 0.05
    bad: Annotated[float, about("Malformed requests beside each good one.", least=0, most=1)] = 0.1
    burst_size: Annotated[int, about("Requests that come at once in a burst; 0 for no bursts.", least=0)] = 48
    burst_every: Annotated[float, about("Time between bursts.", unit="s", above=0)] = 15.0
    faults: Annotated[
        tuple[Fault, ...],
        about(
            "What strikes a server that was started here: kill-worker and kill-scheduler (SIGKILL), hang-worker (SIGSTOP; "
            "--step-timeout-s), flip-host and flip-store (a bit of cached pages; --cache-verify all, --store); the "
            "default is all that the settings allow."
        ),
    ] = ()
    fault_every: Annotated[
        float, about("Mean time from the recovery of one fault to the next, drawn exponentially.", unit="s", above=0)
    ] = 10.0
    recovery_limit: Annotated[float, about("Longest time from a fault to the first new token.", unit="s", above=0)] = (
        60.0
    )
    memory_limit: Annotated[
        float,
        about(
            "Most that a process may grow where it lived for ten minutes after its warm-up.", unit="MiB/min", above=0
        ),
    ] = 1.0
    exact: Annotated[
        bool | None,
        about("Replies must be those recorded, token by token; the default asks that of servers in float64."),
    ] = None
    timeout: Annotated[float, about("Longest time for one request.", unit="s", above=0)] = 120.0
    seed: Annotated[int, about("Seed of everything that is drawn.", least=0)] = 42


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where results go besides the terminal."""

    output: Annotated[Path | None, about("Write figures and raw samples to this JSON file.")] = None


class PlotOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures of a run."""

    plot: Annotated[Path | None, about("Draw the run into this PNG, SVG or PDF file; needs hiserve[bench].")] = None


class GoodputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is good enough."""

    goodput: Annotated[
        tuple[str, ...],
        about("Count requests that meet all of these, in milliseconds: ttft:200 tpot:50 e2e:5000."),
    ] = ()


def add_flags(parser: argparse.ArgumentParser, *sections: type[msgspec.Struct]) -> None:
    for section in sections:
        group = parser.add_argument_group((section.__doc__ or "").rstrip("."))
        for flag in flags_of("bench", section).values():
            flag.add_to(group)


def pick(section: type[_T], arguments: Mapping[str, Any]) -> _T:
    given = {name: arguments[name] for name in get_type_hints(section) if arguments[name] is not None}
    return section(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})

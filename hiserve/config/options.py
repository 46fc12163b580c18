"""Every option, in frozen sections, as the user gives it; ``core.resolve`` turns options into ``Settings``, once.

A field's description is its ``--help`` text and its name is its flag (``page_size`` is
``--page-size``). A class takes its section or plain values, never all ``Options``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from hiserve.config.caching import Cache
from hiserve.config.flags import Flag, about, flags_of, nearest
from hiserve.config.serving import MAX_INT32, Auto, Parallel, ReplyFormatName, Server
from hiserve.errors import ConfigError

AttentionBackend = Literal["auto", "triton", "flashinfer", "reference"]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
GraphGate = Literal["precise", "strict"]
Graphs = Literal["auto", "off", "decode", "all"]
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MAX_SPEC_STEPS = 15
MAX_SPEC_HISTORY = 1 << 20
AUTO_TIERS = (0, 1, 2, 3, 5)  # numbers of drafts of ``auto``; each has its own graphs
MIN_AUTO_LEN = 2 * AUTO_TIERS[-1] + 3  # shortest request, in tokens, for which the costs of drafts can be measured


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how it is loaded."""

    model: Annotated[
        str,
        about("Checkpoint folder in Hugging Face layout, a hub id (owner/name), or hiserve-nano, the embedded model."),
    ] = "hiserve-nano"
    revision: Annotated[str | None, about("Branch, tag or commit of a hub model; the default is main.")] = None
    dtype: Annotated[
        DType,
        about("Type of weights and KV cache; auto is the checkpoint's, and float32 on CPU. float64 is for tests."),
    ] = "auto"
    quantize: Annotated[
        Literal["off", "fp8", "int4"],
        about(
            "Rounds the weights of attention's projections and of MLPs when they are loaded: to 8 bits (E4M3, a scale for each output), "
            "or to 4 (a scale for each 128 inputs of an output). A checkpoint that is quantized itself stays as it is, with off."
        ),
    ] = "off"
    state_dtype: Annotated[
        Literal["float32", "bfloat16", "float64"],
        about(
            "Type in which recurrent states are kept, of models that have them; bfloat16 takes half of the memory, on all tiers, and rounds a "
            "state whenever it is stored. With --dtype float64 it is float64.",
            is_debug=True,
        ),
    ] = "float32"
    max_model_len: Annotated[
        int | Auto,
        about(
            "Longest prompt plus output; auto is the model's context, or what the KV pool holds if that is less.",
            unit="tokens",
            least=2,
            most=MAX_INT32,
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        about("auto reads the weights; dummy draws random ones of the configured shape.", is_debug=True),
    ] = "auto"
    shape: Annotated[
        Literal[
            "llama-8b",
            "qwen3-0.6b",
            "qwen3-8b",
            "gpt-oss-20b",
            "gpt-oss-20b-mxfp4",
            "gemma-3-27b",
            "glm-4.7-flash",
            "v3-like",
            "v3.2-like",
            "qwen3.5-35b-a3b",
            "v4-flash-like",
            "v4-flash-like-fp4",
        ]
        | None,
        about(
            "Built-in shape for dummy weights; the model then gives only the tokenizer and its end tokens.",
            is_debug=True,
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], about("Where the model runs; auto is cuda if a device is there.")
    ] = "auto"
    chat_template: Annotated[
        str | None, about("File with a Jinja chat template that takes the place of the model's own.")
    ] = None
    reply_format: Annotated[
        ReplyFormatName,
        about(
            "Spelling of thoughts and tool calls in replies; auto is the chat template's, none leaves them in the text."
        ),
    ] = "auto"
    thoughts: Annotated[
        Literal["auto", "keep"],
        about(
            "Thoughts of earlier turns in prompts: auto is as the chat template does; keep turns its switch on, so that the "
            "cached prefix goes on at the user's next turn."
        ),
    ] = "auto"
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        about("Sampling where a request is silent: as generation_config.json says, or temperature 1 and no filter."),
    ] = "model"


class Scheduler(msgspec.Struct, frozen=True, kw_only=True):
    """Admission and batching."""

    max_running_requests: Annotated[
        int | Auto,
        about(
            "Requests a worker runs at once; auto is 32 on cpu and 256 on cuda.",
            unit="requests",
            least=1,
            most=MAX_INT32,
        ),
    ] = "auto"
    max_batched_tokens: Annotated[
        int | Auto,
        about(
            "Tokens computed per step, prefill chunks and decodes together; auto is 512 on cpu and 8192 on cuda.",
            unit="tokens",
            least=1,
            most=MAX_INT32,
        ),
    ] = "auto"
    policy: Annotated[
        Literal["fcfs", "longest-prefix", "priority"],
        about("Order of admission: first come, longest cached prefix, or largest priority of a request."),
    ] = "fcfs"
    max_queued_requests: Annotated[
        int,
        about(
            "Requests that may wait for a worker; more are refused with 429.", unit="requests", least=1, most=MAX_INT32
        ),
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        about(
            "Prompt tokens that may wait for a worker; more are refused with 429.",
            unit="tokens",
            least=1,
            most=MAX_INT32,
        ),
    ] = 8_000_000
    queue_timeout_s: Annotated[
        float,
        about(
            "Longest a request may wait for a worker, then it ends with 503; 0 is no limit.",
            unit="s",
            least=0,
            most=86_400,
        ),
    ] = 0.0
    request_timeout_s: Annotated[
        float,
        about(
            "Longest time of a request; then it ends with its output until then and finish_reason abort; 0 is no limit.",
            unit="s",
            least=0,
            most=86_400,
        ),
    ] = 0.0
    step_timeout_s: Annotated[
        float,
        about(
            "Longest time without a finished step while a worker has requests; then it counts as hanging and is restarted. "
            "Time without a CPU does not count; the limit doubles for the next one if it was computing; 0 is no limit.",
            unit="s",
            least=0,
            most=86_400,
        ),
    ] = 300.0


class Runner(msgspec.Struct, frozen=True, kw_only=True):
    """How steps are executed."""

    overlap: Annotated[
        int | Auto,
        about(
            "Steps planned ahead of the running one, 0 or 1; auto is 1 on cuda and 0 on cpu. With drafts and the attention "
            "backend flashinfer, which needs exact lengths, it is always 0.",
            unit="steps",
            least=0,
            most=1,
            is_debug=True,
        ),
    ] = "auto"
    attention_backend: Annotated[
        AttentionBackend,
        about(
            "Attention kernels on cuda; auto decodes with triton, and takes flashinfer for prompts where that is faster."
        ),
    ] = "auto"
    exact: Annotated[
        bool,
        about(
            "Makes every sum in one order, whatever else a step computes: chunks, cached prefixes, drafts, other requests and "
            "their number change no bit of a reply. In bfloat16 and float16 on cuda, and any type on cpu; slower."
        ),
    ] = False
    graphs: Annotated[
        Graphs,
        about(
            "Steps replayed as CUDA graphs: decode, or all, prefill and mixed ones too; auto is all on cuda, off on cpu."
        ),
    ] = "auto"
    graph_gate: Annotated[
        GraphGate,
        about(
            "When a step may be replayed beside loads from the host: precise, after the loads that it reads; strict, only "
            "without any load or relocation of a running request's page.",
            is_debug=True,
        ),
    ] = "precise"
    graph_max_len: Annotated[
        int | Auto,
        about(
            "Longest request whose steps are replayed as whole graphs; a step with a longer one is replayed in pieces or "
            "runs without graphs. A smaller number saves device memory; auto is --max-model-len.",
            unit="tokens",
            least=64,
            most=MAX_INT32,
            is_debug=True,
        ),
    ] = "auto"
    cpu_threads: Annotated[
        int | Auto,
        about(
            "Threads a worker computes with on cpu; auto is the cores less one, shared among replicas.",
            unit="threads",
            least=1,
            most=1024,
        ),
    ] = "auto"
    grammar_threads: Annotated[
        int | Auto,
        about(
            "Threads for masks of grammars; auto is half of the cores, shared among replicas, 8 at most.",
            unit="threads",
            least=1,
            most=1024,
            is_debug=True,
        ),
    ] = "auto"


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding: draft tokens are verified together; the output does not change."""

    spec: Annotated[
        str,
        about(
            "Proposer of draft tokens: eagle3 or mtp, the model's own head; auto, that head if there is one; off, none; ngram, "
            "the tokens that followed the same last tokens before, in the request or in replies to its tenant; eagle3:PATH or "
            "mtp:PATH, a separate head; draft:PATH, a small model with the same vocabulary."
        ),
    ] = "auto"
    spec_steps: Annotated[
        int | Auto,
        about(
            "Drafts after each sampled token; auto chooses the fastest number for each step, 5 at most.",
            unit="tokens",
            least=0,
            most=MAX_SPEC_STEPS,
        ),
    ] = "auto"
    spec_tree: Annotated[
        str,
        about(
            "Drafts of a head or draft model as a tree of candidates: off, chains; WIDTHxDEPTH:NODES, such as 3x6:16, the likeliest "
            "candidates after each of the likeliest, DEPTH deep, of which NODES, the last sampled token included, are verified "
            "after each step; auto, for each step the fastest of such trees and chains, chains alone where there are no trees. "
            "--spec-steps is left out then.",
            is_debug=True,
        ),
    ] = "off"
    spec_history: Annotated[
        int,
        about(
            "Tokens of replies that each worker keeps of each tenant for --spec ngram, the latest ones; 0 keeps none, and so "
            "does --disable-prefix-cache.",
            unit="tokens",
            least=0,
            most=MAX_SPEC_HISTORY,
            is_debug=True,
        ),
    ] = 65_536


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The user's options, a section for each part of the engine."""

    model: Model = Model()
    cache: Cache = Cache()
    scheduler: Scheduler = Scheduler()
    runner: Runner = Runner()
    spec: Spec = Spec()
    parallel: Parallel = Parallel()
    server: Server = Server()


SECTIONS = {section.name: type(section.default) for section in msgspec.structs.fields(Options)}
Given = TypeVar("Given", bound=Options)


@cache
def flags() -> Mapping[str, Flag]:
    """Returns the flag of every option by name, in the order of the sections; made once: a command asks 70 times, and it takes 3 ms."""
    return {name: flag for section, kind in SECTIONS.items() for name, flag in flags_of(section, kind).items()}


def by_group() -> list[Flag]:
    """Returns the flags in the order in which they are shown: group by group, those for debugging last."""
    return sorted(flags().values(), key=lambda flag: flag.is_debug)


def make_options(**values: Any) -> Options:
    """Builds options from flat names, as flags and ``LLM(...)`` give them.

    Numbers may be given as text. Names with dashes are accepted.

    Raises:
        ConfigError: An unknown name (the nearest known one is suggested), or a value of the wrong type or out of range.
    """
    known = flags()
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for given, value in values.items():
        name = given.replace("-", "_")
        if name not in known:
            raise ConfigError(f"unknown setting {given!r}.{nearest(name, known)}", param=given)
        sections[known[name].section][name] = known[name].check(value)
    return Options(**{section: kind(**sections[section]) for section, kind in SECTIONS.items()})


def flat(options: Options) -> dict[str, Any]:
    """Returns every value by its flat name, as ``make_options`` takes them."""
    return {name: getattr(getattr(options, flag.section), name) for name, flag in flags().items()}


def without_secrets(options: Given) -> Given:
    """Returns options or settings without secrets, to be shown or sent to other processes."""
    hidden: dict[str, dict[str, Any]] = {}
    for flag in flags().values():
        if flag.is_secret:
            hidden.setdefault(flag.section, {})[flag.name] = flag.default
    sections = {name: msgspec.structs.replace(getattr(options, name), **values) for name, values in hidden.items()}
    return msgspec.structs.replace(options, **sections)

"""Turns options into settings for one model on one machine: chooses values, plans memory, explains both."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from hiserve.config.caching import KVDType
from hiserve.config.flags import flag_of
from hiserve.config.options import Options, flags
from hiserve.config.serving import MAX_INT32, Auto
from hiserve.config.settings import (
    CacheSettings,
    Device,
    DType,
    Graphs,
    ModelSettings,
    RunnerSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
)
from hiserve.core.devices import choose_devices
from hiserve.core.endpoints import check_kv_events
from hiserve.core.machine import Machine
from hiserve.core.memory_plan import Chosen, plan_memory
from hiserve.core.memory_sizes import MemoryPlan
from hiserve.core.step_memory import ModelFacts
from hiserve.errors import ConfigError

# Of the largest body: an id takes up to 8 bytes, a token of escaped text some 9; a body may have several prompts.
BODY_BYTES_PER_TOKEN, LEAST_BODY_BYTES = 32, 8 * 2**20
MAX_GRAMMAR_THREADS = 8
EXACT_DTYPES = ("bfloat16", "float16")  # on cuda
Section = TypeVar("Section", bound=msgspec.Struct)


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, with the decisions that led to them."""

    settings: Settings  # a value for every option, without the cache identity
    decisions: tuple[str, ...]  # one line for each value that was chosen here
    memory: MemoryPlan  # of each worker

    @property
    def remarks(self) -> list[str]:
        """One line for each tier of the cache that cannot help."""
        return self.memory.remarks(self.settings.cache)


def resolve(options: Options, model: ModelFacts, machine: Machine) -> Resolved:
    """Replaces every ``auto``. Pure: the same facts give the same answer.

    Raises:
        ConfigError: Options contradict each other or the model.
        ResourceError: Weights, KV pool and tables do not fit in memory; the message says what to lower.
    """
    check_kv_events(options)
    chosen = _choose(options, model, machine)
    memory = plan_memory(chosen, model, machine)
    settings = _settings(chosen, memory)
    no_windows = (
        {}
        if memory.window_pages or memory.snapshot_slots
        else dict.fromkeys(("tail_share", "tail_every"), "no boundary needs a tail")
    )
    packed_reason = _packed_reason(model, is_exact=options.runner.exact)
    decisions = _decisions(options, settings, memory.reasons | no_windows | packed_reason)
    return Resolved(settings=settings, decisions=decisions, memory=memory)


def _choose(options: Options, model: ModelFacts, machine: Machine) -> Chosen:
    """Replaces every ``auto`` that does not depend on memory."""
    device = _device(options, machine)
    on_cpu = device == "cpu"
    dtype = _dtype(options, model, on_cpu=on_cpu)
    kv_dtype = _kv_dtype(options, model)
    _check_backend(options, on_cpu=on_cpu)
    if options.runner.exact:
        _check_exact(options, model, dtype, on_cpu=on_cpu)
    scheduler, runner, parallel = options.scheduler, options.runner, options.parallel
    length = _or(options.model.max_model_len, model.context_length)
    if length > model.context_length:
        raise ConfigError(
            f"--max-model-len is {length} but the model's context is {model.context_length} tokens. Lower it.",
            param="max_model_len",
        )
    return Chosen(
        given=options,
        model=_filled(
            ModelSettings,
            options.model,
            device=device,
            dtype=dtype,
            max_model_len=length,
        ),
        scheduler=_filled(
            SchedulerSettings,
            scheduler,
            max_running_requests=_or(scheduler.max_running_requests, 32 if on_cpu else 256),
            max_batched_tokens=_or(scheduler.max_batched_tokens, 512 if on_cpu else 8192),
        ),
        runner=_filled(
            RunnerSettings,
            runner,
            overlap=_or(runner.overlap, 0 if on_cpu else 1),
            cpu_threads=_or(runner.cpu_threads, max(1, max(1, machine.cores - 1) // parallel.num_ranks)),
            grammar_threads=_or(
                runner.grammar_threads, max(1, min(MAX_GRAMMAR_THREADS, machine.cores // 2 // parallel.replicas))
            ),
            graphs=_graphs(options, on_cpu=on_cpu),
        ),
        page_size=_page_size(options, model),
        kv_dtype=kv_dtype,
        devices=choose_devices(options, len(machine.cuda_memory_bytes), on_cpu=on_cpu),
    )


def _page_size(options: Options, model: ModelFacts) -> int:
    """Returns the tokens of a page.

    Raises:
        ConfigError: Rows would stand for tokens of two pages.
    """
    given = _or(options.cache.page_size, model.page_size)
    if given % model.page_multiple:
        raise ConfigError(
            f"--page-size is {given}, but rows of this model stand for up to {max(r for _, r in model.ratio_elements)} tokens: a "
            f"page has a multiple of {model.page_multiple}. Leave it out, or give such a number.",
            param="page_size",
        )
    return given


def _settings(chosen: Chosen, memory: MemoryPlan) -> Settings:
    """Joins chosen and planned values."""
    options, length = chosen.given, memory.max_model_len
    body_bytes = min(MAX_INT32, max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * length))
    return Settings(
        model=msgspec.structs.replace(chosen.model, max_model_len=length),
        cache=_filled(
            CacheSettings,
            options.cache,
            kv_pages=memory.kv_pages,
            kv_dtype=chosen.kv_dtype,
            window_pages=memory.window_pages,
            snapshot_slots=memory.snapshot_slots,
            tail_share=memory.tail_share,
            tail_every=memory.tail_every,
            page_size=chosen.page_size,
            host_cache_gib=memory.host_cache_gib,
        ),
        scheduler=memory.scheduler,
        runner=chosen.runner,
        spec=memory.spec,
        parallel=msgspec.structs.replace(options.parallel, devices=",".join(map(str, chosen.devices)) or None),
        server=_filled(
            ServerSettings, options.server, max_request_bytes=_or(options.server.max_request_bytes, body_bytes)
        ),
    )


def _decisions(options: Options, settings: Settings, reasons: dict[str, str]) -> tuple[str, ...]:
    """Returns a line for each value that changed, with its reason if there is one."""
    lines = []
    for flag in flags().values():
        before, after = (getattr(getattr(each, flag.section), flag.name) for each in (options, settings))
        if before != after:
            shown = f"{after:.3g}" if isinstance(after, float) else after
            reason = reasons.get(flag.name)
            lines.append(f"{flag_of(flag.name)} {before} -> {shown}" + (f": {reason}" if reason else ""))
    return tuple(lines)


def _filled(kind: type[Section], section: msgspec.Struct, **values: Any) -> Section:
    """Returns a section of settings: the options, with values for those that were ``auto``."""
    return kind(**msgspec.structs.asdict(section) | values)


def _or(value: int | Auto, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def _device(options: Options, machine: Machine) -> Device:
    device = options.model.device
    if device == "auto":
        return "cuda" if machine.cuda_memory_bytes else "cpu"
    if device == "cuda" and not machine.cuda_memory_bytes:
        raise ConfigError("--device is cuda but no CUDA device was found. Use --device cpu.", param="device")
    return device


def _dtype(options: Options, model: ModelFacts, *, on_cpu: bool) -> DType:
    if options.model.dtype != "auto":
        return options.model.dtype
    return "float32" if on_cpu else model.checkpoint_dtype


def _graphs(options: Options, *, on_cpu: bool) -> Graphs:
    graphs = options.runner.graphs
    if graphs == "auto":
        return "off" if on_cpu else "all"
    if on_cpu and graphs != "off":
        raise ConfigError(
            f"--graphs is {graphs} but the model runs on cpu, and CUDA graphs need a CUDA device. Leave --graphs out, or "
            "use --device cuda.",
            param="graphs",
        )
    return graphs


def _kv_dtype(options: Options, model: ModelFacts) -> KVDType:
    given = options.cache.kv_dtype
    if given == "fp8" and model.packed is None:
        raise ConfigError(
            "--kv-dtype is fp8, but this model cannot have it: keys and values of heads can, if heads have a multiple of 16 "
            "elements; rows of DeepSeek-V4 can, if 8, 16, 32 or 64 of their numbers are rotated, of up to 8 times as many; keys of "
            "an index can, if they have a power of 2 of numbers, 8 at least; latents can, likewise from 32 on. Leave --kv-dtype out.",
            param="kv_dtype",
        )
    if given == "auto":
        packs = model.asks_for_packed and model.packed is not None and not options.runner.exact
        return "fp8" if packs else "bf16"
    return given


def _packed_reason(model: ModelFacts, *, is_exact: bool) -> dict[str, str]:
    """Returns why keys and values are, or are not, what the checkpoint was made for."""
    if not model.asks_for_packed:
        return {}
    if model.packed is None:
        return {"kv_dtype": "the checkpoint was made for fp8, which its rows do not fit"}
    if is_exact:
        return {"kv_dtype": "the checkpoint was made for fp8, but --exact is given"}
    return {"kv_dtype": "the checkpoint was made for it; each token has its own scales"}


def _check_backend(options: Options, *, on_cpu: bool) -> None:
    backend = options.runner.attention_backend
    if on_cpu and backend in ("triton", "flashinfer"):
        raise ConfigError(
            f"--attention-backend is {backend}, which needs a CUDA device, but the model runs on cpu. Leave it out, or use "
            "reference.",
            param="attention_backend",
        )


def _check_exact(options: Options, model: ModelFacts, dtype: DType, *, on_cpu: bool) -> None:
    """Checks that everything that the options ask for has sums in one order.

    Raises:
        ConfigError: Something has not.
    """
    backend, exact = options.runner.attention_backend, "cpu" if on_cpu else "triton"
    if model.inexact is not None:
        raise ConfigError(
            f"--exact is given, but sums of this model have no order of their own, as it has {model.inexact}. Leave --exact out.",
            param="exact",
        )
    if options.parallel.tp > 1:
        raise ConfigError(
            f"--tp is {options.parallel.tp}, whose ranks add their shares, but --exact is given. Leave one of them out.",
            param="tp",
        )
    if backend not in ("auto", exact):
        raise ConfigError(
            f"--attention-backend is {backend}, whose sums depend on the batch, but --exact is given. Leave one of them out.",
            param="attention_backend",
        )
    if options.cache.kv_dtype == "fp8":
        raise ConfigError(
            "--kv-dtype is fp8, whose sums have no order of their own, but --exact is given. Leave one of them out.",
            param="kv_dtype",
        )
    if not on_cpu and dtype not in EXACT_DTYPES:
        raise ConfigError(
            f"--exact is given, but on cuda only {' and '.join(EXACT_DTYPES)} have sums in one order, not {dtype}. Use "
            f"--dtype {EXACT_DTYPES[0]}, or leave --exact out.",
            param="exact",
        )

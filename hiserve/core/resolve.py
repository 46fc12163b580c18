"""Replaces every ``auto`` of a configuration by a value, for one model on one machine; checks that all of it fits."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hiserve.config import DTYPE_BYTES, MAX_INT32, MIN_AUTO_LEN, Auto, Config, Graphs, Spec, flag_of, known, settings
from hiserve.core.devices import choose_devices, least_memory
from hiserve.core.kv_groups import debug_groups, page_hidden_group
from hiserve.core.public_endpoints import check_kv_events
from hiserve.core.step_memory import CONTEXT_BYTES, SPARE_SHARE, DraftShape, StepShape, step_memory
from hiserve.core.transfers import STAGING_BYTES
from hiserve.errors import ConfigError, ResourceError

GIB = 2**30
# Of ``auto`` on cpu, where the device's pages lie in the same memory: enough to outlive a worker, and soon touched.
MAX_CPU_HOST_BYTES = GIB // 4
# Bytes that a row's tables take per token and per page, on the device and on the host together.
TOKEN_ENTRY_BYTES, PAGE_ENTRY_BYTES = 8, 12
# Of the largest body: an id takes up to 8 bytes, a token of escaped text some 9; a body may have several prompts.
BODY_BYTES_PER_TOKEN, LEAST_BODY_BYTES = 32, 8 * 2**20


class DraftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What ``resolve`` must know of what drafts for a model.

    Attributes:
        kind: ``eagle3``, ``mtp`` or ``draft_model``.
        num_params: Parameters.
        slot_elements: KV elements per token, all layers together.
        step: What drafts are made of; of its features a page keeps those of its last token.
    """

    kind: str
    num_params: int
    slot_elements: int
    step: DraftShape


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What ``resolve`` must know of a model.

    Attributes:
        context_length: Tokens the model was made for.
        checkpoint_dtype: Type name of the stored weights.
        num_params: Parameters.
        slot_elements: KV elements per token, all layers together.
        step: What a step of it is made of.
        draft: What drafts for it; None without a checkpoint for that.
    """

    context_length: int
    checkpoint_dtype: str
    num_params: int
    slot_elements: int
    step: StepShape
    draft: DraftFacts | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What ``resolve`` must know of the machine.

    Attributes:
        cores: CPU cores this process may use.
        memory_bytes: Memory still available to it, control-group limits included.
        cuda_memory_bytes: Memory of each CUDA device, all of it.
        shm_bytes: Free in /dev/shm.
        kept_bytes: Pages of a segment that ``--host-cache-name`` names and a former server left, in bytes; 0 when there
            is none. What such segments take of memory and /dev/shm is counted as available.
    """

    cores: int
    memory_bytes: int
    cuda_memory_bytes: tuple[int, ...]
    shm_bytes: int = 0
    kept_bytes: int = 0


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration without ``auto``, and how it came about.

    Attributes:
        config: Every ``auto`` replaced.
        decisions: One line for each value that was chosen here.
        memory: Bytes per worker where the model runs, item by item.
        host_memory: Bytes per worker beside a device, item by item; nothing on cpu.
    """

    config: Config
    decisions: tuple[str, ...]
    memory: dict[str, int]
    host_memory: dict[str, int]


def resolve(config: Config, model: ModelFacts, machine: Machine) -> Resolved:
    """Replaces every ``auto``. Pure: the same facts give the same answer.

    Raises:
        ConfigError: Settings contradict each other or the model.
        ResourceError: Weights, KV pool and tables do not fit in memory; the message says what to lower.
    """
    check_kv_events(config)
    chosen = _choose(config, model, machine)
    on_cpu, replicas = chosen.model.device == "cpu", config.parallel.replicas
    weights_of = {"weights": model.num_params} | ({"draft weights": model.draft.num_params} if model.draft else {})
    weights_of = {item: num_params * DTYPE_BYTES[chosen.model.dtype] for item, num_params in weights_of.items()}
    weights, page_of = sum(weights_of.values()), _page_bytes(config, model, chosen.model.dtype)
    page = sum(page_of.values())
    free = machine.memory_bytes // replicas if on_cpu else least_memory(chosen, machine.cuda_memory_bytes)
    if weights >= free:
        raise ResourceError(
            f"the weights need {_gib(weights)} as {chosen.model.dtype} but {_gib(free)} are free for each worker. "
            f"{'Lower --replicas, u' if on_cpu else 'U'}se a narrower --dtype or a smaller model.",
            param="replicas" if on_cpu and replicas > 1 else "dtype",
        )
    length = known(chosen.model.max_model_len)
    may_shrink = config.model.max_model_len == "auto"
    if may_shrink:  # what no pool could hold needs no tables either
        length = min(length, max(2, (free - weights) // page * config.cache.page_size))
    needed = sum(_beside_pool(chosen, model, machine, length, page).values())
    pages, length = _size_pool(chosen, length, may_shrink=may_shrink, page=page, room=free - weights, needed=needed)
    others = _beside_pool(chosen, model, machine, length, page)
    memory = weights_of | {item: pages * num_bytes for item, num_bytes in page_of.items()} | others
    if sum(memory.values()) > free:
        rows, tokens = chosen.scheduler.max_running_requests, chosen.scheduler.max_batched_tokens
        raise ResourceError(
            f"{rows} requests at once, of up to {length} tokens and {tokens} of them in a step, need "
            f"{_gib(sum(others.values()))} but {_gib(max(0, free - weights - pages * page))} are free beside weights and "
            "KV pool. Lower --max-running-requests, --max-model-len, --max-batched-tokens or --kv-pages.",
            param="max_running_requests",
        )
    room = free - sum(memory.values()) if on_cpu else machine.memory_bytes // replicas
    host_gib, why = _size_host(config, machine, page=page, pool=pages * page, room=room, on_cpu=on_cpu)
    if config.cache.store is not None and not host_gib:
        raise ConfigError(
            f"--store is {config.cache.store!r} but --host-cache-gib is 0{why and f', as {why}'}: pages come from a store "
            "through the host cache. Raise --host-cache-gib, or leave out --store.",
            param="store",
        )
    host = {"host cache": int(host_gib * GIB)} if host_gib else {}
    spec, why_spec = _spec(config, model, length)
    resolved = msgspec.structs.replace(
        chosen,
        spec=spec,
        model=msgspec.structs.replace(chosen.model, max_model_len=length),
        cache=msgspec.structs.replace(config.cache, kv_pages=pages, host_cache_gib=host_gib),
        server=msgspec.structs.replace(
            config.server, max_request_bytes=_or(config.server.max_request_bytes, _body_bytes(length))
        ),
    )
    return Resolved(
        config=resolved,
        decisions=_decisions(config, resolved, {"host_cache_gib": why, "spec": why_spec}),
        memory=memory | host if on_cpu else memory,
        host_memory={} if on_cpu else host,
    )


def _choose(config: Config, model: ModelFacts, machine: Machine) -> Config:
    """Returns the configuration without any ``auto`` but those that depend on how much memory is left."""
    device = _device(config, machine)
    on_cpu = device == "cpu"
    _check_backend(config, on_cpu=on_cpu)
    scheduler, runner = config.scheduler, config.runner
    threads = max(1, max(1, machine.cores - 1) // config.parallel.replicas)
    length = _or(config.model.max_model_len, model.context_length)
    if length > model.context_length:
        raise ConfigError(
            f"--max-model-len is {length} but the model's context is {model.context_length} tokens. Lower it.",
            param="max_model_len",
        )
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(
            config.model, device=device, dtype=_dtype(config, model, on_cpu=on_cpu), max_model_len=length
        ),
        scheduler=msgspec.structs.replace(
            scheduler,
            max_running_requests=_or(scheduler.max_running_requests, 32 if on_cpu else 256),
            max_batched_tokens=_or(scheduler.max_batched_tokens, 512 if on_cpu else 8192),
        ),
        parallel=msgspec.structs.replace(
            config.parallel, devices=choose_devices(config, len(machine.cuda_memory_bytes), on_cpu=on_cpu)
        ),
        runner=msgspec.structs.replace(
            runner,
            overlap=_or(runner.overlap, 0 if on_cpu else 1),
            cpu_threads=_or(runner.cpu_threads, threads),
            graphs=_graphs(config, on_cpu=on_cpu),
        ),
    )


def _beside_pool(chosen: Config, model: ModelFacts, machine: Machine, length: int, page: int) -> dict[str, int]:
    """Returns the bytes that each worker needs beside weights and pool, item by item.

    Args:
        chosen: As ``_choose`` returns it.
        model: Which one.
        machine: Where it runs.
        length: Longest request, in tokens.
        page: Bytes of a page.
    """
    rows, page_size = known(chosen.scheduler.max_running_requests), chosen.cache.page_size
    tables = (rows + 1) * (length * TOKEN_ENTRY_BYTES + -(-length // page_size) * PAGE_ENTRY_BYTES)
    items = {"token and page tables": tables}
    if chosen.model.device == "cpu":
        return items
    if chosen.cache.host_cache_gib != 0:  # large pages pass through: two each way at least
        items["staging of host pages"] = max(STAGING_BYTES, 4 * page)
    items |= step_memory(
        model.step,
        dtype_bytes=DTYPE_BYTES[chosen.model.dtype],
        max_rows=rows,
        max_tokens=known(chosen.scheduler.max_batched_tokens),
        max_len=length,
        page_size=page_size,
        graphs=chosen.runner.graphs,
        widths=_spec(chosen, model, length)[0].widths,
        draft=None if model.draft is None else model.draft.step,
    )
    return items | {
        "driver, libraries and spare": CONTEXT_BYTES + least_memory(chosen, machine.cuda_memory_bytes) // SPARE_SHARE
    }


def _device(config: Config, machine: Machine) -> Literal["cpu", "cuda"]:
    device = config.model.device
    if device == "auto":
        return "cuda" if machine.cuda_memory_bytes else "cpu"
    if device == "cuda" and not machine.cuda_memory_bytes:
        raise ConfigError("--device is cuda but no CUDA device was found. Use --device cpu.", param="device")
    return device


def _dtype(config: Config, model: ModelFacts, *, on_cpu: bool) -> Any:
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if on_cpu else model.checkpoint_dtype


def _graphs(config: Config, *, on_cpu: bool) -> Graphs:
    graphs = config.runner.graphs
    if graphs == "auto":
        return "off" if on_cpu else "all"
    if on_cpu and graphs != "off":
        raise ConfigError(
            f"--graphs is {graphs} but the model runs on cpu, and CUDA graphs need a CUDA device. Leave --graphs out, or "
            "use --device cuda.",
            param="graphs",
        )
    return graphs


def _spec(config: Config, model: ModelFacts, length: int) -> tuple[Spec, str]:
    """Returns who drafts, and why where that was decided here; ``length`` is the longest request."""
    spec, why = config.spec, ""
    if spec.spec == "auto":
        if model.draft is None:
            who, why = "off", "no head came with the model"
        elif spec.spec_steps == "auto" and length < MIN_AUTO_LEN:
            who, why = "off", f"requests of {length} tokens are too short to measure what drafts cost"
        else:
            who, why = model.draft.kind, "this head came with the model"
        spec = msgspec.structs.replace(spec, spec=who)
    return spec, why


def _check_backend(config: Config, *, on_cpu: bool) -> None:
    backend = config.runner.attention_backend
    if on_cpu and backend in ("triton", "flashinfer"):
        raise ConfigError(
            f"--attention-backend is {backend}, which needs a CUDA device, but the model runs on cpu. Leave it out, or use "
            "reference.",
            param="attention_backend",
        )


def _body_bytes(length: int) -> int:
    """Returns the bytes that the largest sensible body has: a full context of ids, several times, or of escaped text."""
    return min(MAX_INT32, max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * length))


def _or(value: int | Auto, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def _page_bytes(config: Config, model: ModelFacts, dtype: str) -> dict[str, int]:
    """Returns the bytes of a page, by the item that they are part of."""
    page_size = config.cache.page_size
    slot_bytes = model.slot_elements * DTYPE_BYTES[dtype] + sum(group.slot_bytes for group in debug_groups(config))
    items = {"KV pool": page_size * slot_bytes}
    if model.draft is not None:
        slot_bytes = model.draft.slot_elements * DTYPE_BYTES[dtype]
        slot_bytes += page_hidden_group(model.draft.step.feature_size, page_size, dtype).slot_bytes
        items["KV pool of drafts"] = page_size * slot_bytes
    return items


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _size_pool(chosen: Config, length: int, *, may_shrink: bool, page: int, room: int, needed: int) -> tuple[int, int]:
    """Returns (pages, longest request), shrinking whichever of the two was ``auto``.

    Args:
        chosen: As ``_choose`` returns it.
        length: Longest request, if the pool holds it.
        may_shrink: Nobody asked for requests of that length.
        page: Bytes of a page.
        room: Bytes that are free beside the weights.
        needed: Of them, bytes that are needed for other things, at most.
    """
    page_size, given = chosen.cache.page_size, chosen.cache.kv_pages
    if isinstance(given, int):
        pages = given
    else:
        rows = known(chosen.scheduler.max_running_requests)
        share = min(room // 4, 2 * GIB) if chosen.model.device == "cpu" else max(0, room - needed)
        pages = min(share // page, 1 + rows * -(-length // page_size), MAX_INT32)
        if pages < 2:  # one for padding, one to use
            raise ResourceError(
                f"a KV page of {page_size} tokens takes {_gib(page)}: fewer than two fit in {_gib(share)}. Lower "
                "--page-size, --replicas, --max-running-requests or --max-batched-tokens, or set --kv-pages.",
                param="page_size",
            )
    if pages * page > room:
        raise ResourceError(
            f"{pages} KV pages need {_gib(pages * page)} but {_gib(room)} are free beside the weights. "
            "Lower --kv-pages, --replicas or --page-size.",
            param="kv_pages",
        )
    longest = (pages - 1) * page_size
    if longest >= length:
        return pages, length
    if may_shrink and longest >= 2:
        return pages, longest
    raise ConfigError(
        f"{pages} KV pages hold {longest} tokens, fewer than the {length} of the longest request. "
        "Raise --kv-pages or lower --max-model-len.",
        param="kv_pages",
    )


def _size_host(config: Config, machine: Machine, *, page: int, pool: int, room: int, on_cpu: bool) -> tuple[float, str]:
    """Returns the GiB of each worker's host cache, and why it has none where that was decided here.

    Args:
        config: As given.
        machine: Where it is to fit.
        page: Bytes of a page.
        pool: Bytes of the KV pool.
        room: Bytes of host memory that are left for each worker.
        on_cpu: Whether the model runs there.
    """
    cache, where = config.cache, "memory"
    if cache.disable_prefix_cache:
        return 0.0, "the prefix cache is disabled"
    shares = [room // 4, 2 * pool, MAX_CPU_HOST_BYTES] if on_cpu else [room // 2, 4 * pool]
    if cache.host_cache_name is not None:
        shm = machine.shm_bytes // config.parallel.replicas
        shares.append(shm // 2)
        room, where = min((room, where), (shm, "/dev/shm"))
    if isinstance(cache.host_cache_gib, str):
        size = machine.kept_bytes or min(shares)
        if size < 2 * page:  # one is nobody's
            return 0.0, f"{size / GIB:.2g} GiB would hold fewer than two pages of {page / GIB:.2g} GiB"
    else:
        size = int(cache.host_cache_gib * GIB)
        if 0 < size < 2 * page:
            raise ConfigError(
                f"--host-cache-gib is {cache.host_cache_gib:.3g} but two pages take {2 * page / GIB:.3g}. "
                "Raise it, or give 0 for none.",
                param="host_cache_gib",
            )
    if size > room:
        raise ResourceError(
            f"the host cache of each worker needs {_gib(size)} but {_gib(room)} of {where} are left for it. "
            "Lower --host-cache-gib or --replicas.",
            param="host_cache_gib",
        )
    return size / GIB if isinstance(cache.host_cache_gib, str) else cache.host_cache_gib, ""


def _decisions(given: Config, resolved: Config, reasons: dict[str, str]) -> tuple[str, ...]:
    """Returns a line for each value that changed, with the reason where one must be told."""
    lines = []
    for setting in settings().values():
        before = getattr(getattr(given, setting.section), setting.name)
        after = getattr(getattr(resolved, setting.section), setting.name)
        if before != after:
            shown = f"{after:.3g}" if isinstance(after, float) else after
            reason = reasons.get(setting.name)
            lines.append(f"{flag_of(setting.name)} {before} -> {shown}" + (f": {reason}" if reason else ""))
    return tuple(lines)

"""The memory plan of a worker: sizes with their reasons, and bytes by item."""

from __future__ import annotations

import msgspec

from hiserve.config.caching import KVDType
from hiserve.config.options import DTYPE_BYTES, MIN_AUTO_LEN, Options
from hiserve.config.serving import MAX_INT32
from hiserve.config.settings import ModelSettings, RunnerSettings, SchedulerSettings, SpecSettings
from hiserve.core.devices import least_memory
from hiserve.core.draft_trees import choose_trees
from hiserve.core.kv_groups import debug_groups, page_hidden_group
from hiserve.core.machine import GIB, Machine
from hiserve.core.memory_sizes import MemoryPlan
from hiserve.core.packed_experts import PackedSize, unpacks_in_tiles
from hiserve.core.step_memory import CONTEXT_BYTES, SPARE_SHARE, DraftFacts, ModelFacts, step_memory
from hiserve.core.transfers import STAGING_BYTES
from hiserve.core.window_pool import NO_WINDOW_POOL, WindowLimits, WindowPool, plan_windows, rows_within
from hiserve.errors import ConfigError, ResourceError

# Of ``auto`` on cpu, where host and device pages share one memory: enough to survive a worker, and quickly made resident.
MAX_CPU_POOL_BYTES, MAX_CPU_HOST_BYTES = 2 * GIB, GIB // 4
# Bytes that a row's tables take per token and per page, on the device and on the host together.
TOKEN_ENTRY_BYTES, PAGE_ENTRY_BYTES = 8, 12


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Options, and the values of those that do not depend on memory."""

    given: Options
    # ``max_model_len`` is an upper bound, which the plan may lower if it was ``auto``.
    model: ModelSettings
    scheduler: SchedulerSettings  # rows and tokens of the largest step
    runner: RunnerSettings
    page_size: int  # tokens per page
    kv_dtype: KVDType  # of what attention reads
    devices: tuple[int, ...]  # CUDA devices of the ranks of all replicas by number; empty on cpu

    @property
    def on_cpu(self) -> bool:
        """Whether the model runs on cpu."""
        return self.model.device == "cpu"


def plan_memory(chosen: Chosen, model: ModelFacts, machine: Machine) -> MemoryPlan:
    """Sizes the pools and the longest request of a worker, and checks that all of it fits.

    Raises:
        ConfigError: Given sizes contradict each other.
        ResourceError: Something does not fit in memory; the message says what to lower.
    """
    worker = _Worker(chosen, model, machine)
    worker.check_weights()
    rows = worker.rows_within()
    if rows != chosen.scheduler.max_running_requests:
        scheduler = msgspec.structs.replace(chosen.scheduler, max_running_requests=rows)
        chosen = msgspec.structs.replace(chosen, scheduler=scheduler)
        worker = _Worker(chosen, model, machine)
    pages, length, reasons = worker.size_pool()
    reasons["max_running_requests"] = f"each carries {_gib(worker.row_bytes)} along" if worker.row_bytes else ""
    window_pages, reasons["window_pages"] = worker.size_windows(pages)
    slots = worker.size_slots(pages, length)
    parts = worker.parts(pages, length)
    room = worker.check_parts(parts, pages, length)
    host_gib, why = worker.size_host(pages, room)
    if chosen.given.cache.store is None and chosen.given.cache.store_secret_file is not None:
        raise ConfigError(
            "--store-secret-file is the secret of a --store on the network, and there is no --store. Give both, or neither.",
            param="store_secret_file",
        )
    if chosen.given.cache.store is not None and not host_gib:
        raise ConfigError(
            f"--store is {chosen.given.cache.store!r} but --host-cache-gib is 0{why and f', as {why}'}: pages come from a "
            "store through the host cache. Raise --host-cache-gib, or leave out --store.",
            param="store",
        )
    host = {"host cache": int(host_gib * GIB)} if host_gib else {}
    spec, of_spec = choose_spec(chosen.given, model, length)
    return MemoryPlan(
        kv_pages=pages,
        window_pages=window_pages,
        snapshot_slots=slots,
        tail_share=worker.windows.tail_share(worker.page_bytes),
        tail_every=worker.windows.tail_every(chosen.given.cache.tail_every, worker.page_bytes),
        page_bytes=worker.page_bytes,
        max_model_len=length,
        host_cache_gib=host_gib,
        scheduler=chosen.scheduler,
        spec=spec,
        free=worker.free,
        parts=parts | host if chosen.on_cpu else parts,
        host_parts={} if chosen.on_cpu else host,
        reasons={name: reason for name, reason in (reasons | of_spec | {"host_cache_gib": why}).items() if reason},
    )


def choose_spec(given: Options, model: ModelFacts, length: int) -> tuple[SpecSettings, dict[str, str]]:
    """Returns the proposer, and the reasons of what was chosen; ``length`` is the longest request.

    Raises:
        ConfigError: Drafts cannot be the trees that are asked for.
    """
    proposer, why = given.spec.spec, ""
    if proposer == "auto":
        may_measure = given.spec.spec_steps == "auto" and given.spec.spec_tree in ("off", "auto")
        if model.draft is None:
            proposer, why = "off", "no head came with the model"
        elif may_measure and length < MIN_AUTO_LEN:
            proposer, why = "off", f"requests of {length} tokens are too short to measure what drafts cost"
        else:
            proposer, why = model.draft.kind, "this head came with the model"
    tree, why_tree = choose_trees(given, model, length, proposer, why)
    chosen = SpecSettings(**msgspec.structs.asdict(given.spec) | {"spec": proposer, "spec_tree": tree})
    return chosen, {"spec": why, "spec_tree": why_tree}


class _Worker:
    """One worker's memory while it is planned."""

    def __init__(self, chosen: Chosen, model: ModelFacts, machine: Machine) -> None:
        self._chosen, self._model, self._machine = chosen, model, machine
        self._cache = chosen.given.cache
        self._packs_rows = chosen.kv_dtype == "fp8"
        self._num_ranks = chosen.given.parallel.num_ranks  # processes that share the machine's memory
        element = DTYPE_BYTES[chosen.model.dtype]
        owners = {"weights": model} | ({"draft weights": model.draft} if model.draft else {})
        self._weights = {item: _weight_bytes(owner, chosen.model) for item, owner in owners.items()}
        dtype, num_draft = chosen.model.dtype, choose_spec(chosen.given, model, chosen.model.max_model_len)[0].tiers[-1]
        carried = model.carried
        self.row_bytes = 0 if carried is None else carried.row[dtype] + num_draft * carried.draft[dtype]
        self._snapshot_bytes = 0 if carried is None else carried.snapshot[dtype]
        self.windows = self._plan_windows(element, num_draft)
        self._page = self._page_items(element)
        self.page_bytes = sum(self._page.values())
        if chosen.on_cpu:
            self.free = machine.memory_bytes // self._num_ranks
        else:
            self.free = least_memory(chosen.devices, machine.cuda_memory_bytes)
        self._room = self.free - sum(self._weights.values())  # beside the weights

    def _page_items(self, element: int) -> dict[str, int]:
        """Returns the bytes of a page, by the item that they are part of."""
        page_size, draft = self._chosen.page_size, self._model.draft
        rows = self._model.stored_bytes(element, packs_rows=self._packs_rows)
        slot_bytes = rows.token - self.windows.slot_bytes
        slot_bytes += sum(group.slot_bytes for group in debug_groups(self._cache))
        rare = sum(num_bytes * (page_size // ratio) for num_bytes, ratio in rows.ratios)
        items = {"KV pool": page_size * slot_bytes + rare}
        if draft is not None:
            hidden = page_hidden_group(draft.step.feature_size, page_size, self._chosen.model.dtype)
            slot_bytes = draft.slot_elements * element
            if self._packs_rows and draft.packed is not None:
                slot_bytes = draft.packed.token
            items["KV pool of drafts"] = page_size * (slot_bytes + hidden.slot_bytes)
        return items

    def _plan_windows(self, element: int, num_draft: int) -> WindowPool:
        chosen, model = self._chosen, self._model
        pool = msgspec.structs.replace(
            NO_WINDOW_POOL,
            share=self._cache.tail_share,
            snapshot_bytes=self._snapshot_bytes,
            page_size=chosen.page_size,
        )
        obstacles = {
            "the model has not both layers with a window and layers without": not model.window,
            "they have no canary, and --kv-canary is given": self._cache.kv_canary,
        }
        if not plan_windows(self._cache.window_pages, [fact for fact, is_so in obstacles.items() if is_so]):
            return pool
        limits = WindowLimits(
            window=model.window,
            page_size=self._chosen.page_size,
            num_draft=num_draft,
            depth=chosen.runner.overlap,
            max_batched_tokens=chosen.scheduler.max_batched_tokens,
            has_snapshots=self._snapshot_bytes > 0,
        )
        rows = model.stored_bytes(element, packs_rows=self._packs_rows)
        return msgspec.structs.replace(pool, limits=limits, slot_bytes=rows.window)

    def rows_within(self) -> int:
        """Returns the requests that run at once; see ``window_pool.rows_within``."""
        given, rows = self._chosen.given.scheduler.max_running_requests, self._chosen.scheduler.max_running_requests
        return rows_within(given, rows, self.row_bytes, self._room)

    def size_slots(self, pages: int, length: int) -> int:
        """Returns the slots of snapshots beside so many pages; see ``WindowPool.size_slots``."""
        num_bytes, windows = pages * self.page_bytes, self.size_windows(pages)[0] * self.windows.page_bytes
        room = self._room - num_bytes - windows - sum(self._beside_pool(length).values())
        return self.windows.size_slots(pages, num_bytes, room)

    def size_windows(self, pages: int) -> tuple[int, str]:
        """Returns the pages of the window layers' pool beside so many others, and the reason; see ``WindowPool.size``."""
        rows, num_bytes = self._chosen.scheduler.max_running_requests, pages * self.page_bytes
        return self.windows.size(self._cache.window_pages, pages, num_bytes, rows, self._room - num_bytes)

    def check_weights(self) -> None:
        """Raises ``ResourceError`` if not even the weights fit."""
        if self._room > 0:
            return
        parallel = self._chosen.given.parallel
        process, share_memory = "worker" if parallel.tp == 1 else "rank", self._chosen.on_cpu and parallel.replicas > 1
        raise ResourceError(
            f"the weights need {_gib(self.free - self._room)} as {self._chosen.model.dtype} but {_gib(self.free)} are free "
            f"for each {process}. {'Lower --replicas, u' if share_memory else 'U'}se a narrower --dtype or a smaller model"
            f"{'' if self._chosen.on_cpu else ', or raise --tp'}.",
            param="replicas" if share_memory else "dtype",
        )

    def size_pool(self) -> tuple[int, int, dict[str, str]]:
        """Returns pages, longest request and reasons; a size that was ``auto`` is lowered to fit.

        Raises:
            ConfigError: The given pages do not hold a request of the given length.
            ResourceError: The pages do not fit.
        """
        page_size, given = self._chosen.page_size, self._cache.kv_pages
        length, reasons = self._chosen.model.max_model_len, dict[str, str]()
        may_shrink = self._chosen.given.model.max_model_len == "auto"
        if may_shrink:
            reasons["max_model_len"] = "the model's context"
            # No longer than the largest pool: its tables take memory too.
            length = min(length, max(2, self._room // self.page_bytes * page_size))
        if isinstance(given, int):
            pages = given
        else:
            pages, reasons["kv_pages"] = self._auto_pages(length)
        if pages * self.page_bytes > self._room:
            raise ResourceError(
                f"{pages} KV pages need {_gib(pages * self.page_bytes)} but {_gib(self._room)} are free beside the weights. "
                "Lower --kv-pages, --replicas or --page-size.",
                param="kv_pages",
            )
        longest = (pages - 1) * page_size
        if longest >= length:
            return pages, length, reasons
        if may_shrink and longest >= 2:
            return pages, longest, reasons | {"max_model_len": "all that the KV pool holds"}
        raise ConfigError(
            f"{pages} KV pages hold {longest} tokens, fewer than the {length} of the longest request. "
            "Raise --kv-pages or lower --max-model-len.",
            param="kv_pages",
        )

    def _auto_pages(self, length: int) -> tuple[int, str]:
        """Returns the pages of ``auto``, and the reason.

        Raises:
            ResourceError: Fewer than two fit: one for padding, one to use.
        """
        page_size, rows = self._chosen.page_size, self._chosen.scheduler.max_running_requests
        if self._chosen.on_cpu:
            share, why = min(
                (self._room // 4, "a quarter of the memory beside the weights"),
                (MAX_CPU_POOL_BYTES, f"{_gib(MAX_CPU_POOL_BYTES)} are the most on cpu"),
            )
        else:
            share = max(0, self._room - sum(self._beside_pool(length).values()))
            why = "all memory beside weights, tables and steps"
        pages, why = min(
            (self.windows.pages_beside(self._cache.window_pages, share, self.page_bytes), why),
            (1 + rows * -(-length // page_size), f"as many as {rows} requests of {length:,} tokens fill"),
            (MAX_INT32, "page numbers have 32 bits"),
        )
        if pages < 2:
            raise ResourceError(
                f"a KV page of {page_size} tokens takes {_gib(self.page_bytes)}: fewer than two fit in {_gib(share)}. Lower "
                "--page-size, --replicas, --max-running-requests or --max-batched-tokens, or set --kv-pages.",
                param="page_size",
            )
        return pages, why

    def _beside_pool(self, length: int) -> dict[str, int]:
        """Returns the bytes beside weights and pool, by item, for requests of up to ``length`` tokens."""
        chosen, page_size = self._chosen, self._chosen.page_size
        rows = chosen.scheduler.max_running_requests
        tables = (rows + 1) * (length * TOKEN_ENTRY_BYTES + -(-length // page_size) * PAGE_ENTRY_BYTES)
        items = {"token and page tables": tables * (2 if self.windows.page_bytes else 1)}
        if self.row_bytes:
            items["states of requests"] = (rows + 1) * self.row_bytes
        if chosen.on_cpu:
            return items
        if self._cache.host_cache_gib != 0:  # large pages and images pass through: two each way at least
            largest = max(self.page_bytes, self.windows.image_bytes(self.page_bytes))
            items["staging of host pages"] = max(STAGING_BYTES, 4 * largest)
        items |= step_memory(
            self._model.step,
            dtype_bytes=DTYPE_BYTES[chosen.model.dtype],
            max_rows=rows,
            max_tokens=chosen.scheduler.max_batched_tokens,
            max_len=length,
            page_size=page_size,
            graphs=chosen.runner.graphs,
            widths=choose_spec(chosen.given, self._model, length)[0].widths,
            draft=None if self._model.draft is None else self._model.draft.step,
            frees_windows=self.windows.page_bytes > 0,
            is_exact=chosen.runner.exact,
        )
        return items | {"driver, libraries and spare": CONTEXT_BYTES + self.free // SPARE_SHARE}

    def parts(self, pages: int, length: int) -> dict[str, int]:
        """Returns the bytes where the model runs, by item, the host cache not included."""
        pool = {item: pages * num_bytes for item, num_bytes in self._page.items()}
        if self.windows.page_bytes:
            pool["KV pool of windows"] = self.size_windows(pages)[0] * self.windows.page_bytes
        if self._snapshot_bytes:
            pool["snapshots of states"] = self.size_slots(pages, length) * self._snapshot_bytes
        return self._weights | pool | self._beside_pool(length)

    def check_parts(self, parts: dict[str, int], pages: int, length: int) -> int:
        """Returns the bytes of host memory that are left for a worker.

        Raises:
            ResourceError: The parts do not fit where the model runs.
        """
        left = self.free - sum(parts.values())
        if left >= 0:
            return left if self._chosen.on_cpu else self._machine.memory_bytes // self._num_ranks
        beside = self._room - pages * self.page_bytes
        scheduler = self._chosen.scheduler
        raise ResourceError(
            f"{scheduler.max_running_requests} requests at once, of up to {length} tokens and {scheduler.max_batched_tokens} of "
            f"them in a step, need {_gib(beside - left)} but {_gib(max(0, beside))} are free beside weights and "
            "KV pool. Lower --max-running-requests, --max-model-len, --max-batched-tokens or --kv-pages.",
            param="max_running_requests",
        )

    def size_host(self, pages: int, room: int) -> tuple[float, str]:
        """Returns the GiB of the host cache, and the reason; empty if it was given.

        Args:
            pages: Of the device pool.
            room: Bytes of host memory that are left.

        Raises:
            ConfigError: The given size holds fewer than two pages.
            ResourceError: It does not fit.
        """
        given, page, where = self._cache.host_cache_gib, self.page_bytes, "memory"
        if self._cache.disable_prefix_cache:
            return 0.0, "the prefix cache is disabled"
        shares = self._host_shares(pages * page, room)
        if self._cache.host_cache_name is not None:
            shm = self._machine.shm_bytes // self._num_ranks
            shares.append((shm // 2, "half of /dev/shm"))
            room, where = min((room, where), (shm, "/dev/shm"))
        if isinstance(given, str):
            kept = self._machine.kept_bytes
            size, why = (kept, "the size of the segment that was kept") if kept else min(shares)
            if size < 2 * page:  # page 0 is unused
                return 0.0, f"{size / GIB:.2g} GiB would hold fewer than two pages of {page / GIB:.2g} GiB"
        else:
            size, why = int(given * GIB), ""
            if 0 < size < 2 * page:
                raise ConfigError(
                    f"--host-cache-gib is {given:.3g} but two pages take {2 * page / GIB:.3g}. Raise it, or give 0 for none.",
                    param="host_cache_gib",
                )
        if size > room:
            raise ResourceError(
                f"the host cache of each worker needs {_gib(size)} but {_gib(room)} of {where} are left for it. "
                "Lower --host-cache-gib or --replicas.",
                param="host_cache_gib",
            )
        return size / GIB if isinstance(given, str) else given, why

    def _host_shares(self, pool: int, room: int) -> list[tuple[int, str]]:
        """Returns the upper bounds of a host cache under ``auto``, each with its reason."""
        if self._chosen.on_cpu:
            return [
                (room // 4, "a quarter of the memory that is left"),
                (2 * pool, "twice the KV pool"),
                (MAX_CPU_HOST_BYTES, "the most on cpu"),
            ]
        return [(room // 2, "half of the memory that is left"), (4 * pool, "four times the KV pool")]


def _weight_bytes(owner: ModelFacts | DraftFacts, model: ModelSettings) -> int:
    sizes = [owner.packed_experts if unpacks_in_tiles(model.device, model.dtype) else PackedSize()]
    if isinstance(owner, ModelFacts):
        sizes.append(owner.quantized_linears)
    num_whole = owner.num_params - sum(each.num_params for each in sizes)
    return num_whole * DTYPE_BYTES[model.dtype] + sum(each.num_bytes for each in sizes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"

"""Settings: options where every ``auto`` has been replaced by a value, with the identity of the cache; they travel to every process."""

from __future__ import annotations

from typing import Literal

import msgspec

from hiserve.config.caching import Cache, KVDType
from hiserve.config.options import AUTO_TIERS, Model, Options, Runner, Scheduler, Spec
from hiserve.config.serving import Server

Device = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16", "float16", "float64"]
Graphs = Literal["off", "decode", "all"]


class FileStamp(msgspec.Struct, frozen=True, array_like=True):
    """A file when the identity was computed; valid for one run of the server, and no part of the namespace."""

    path: str
    inode: int  # number of the file within its file system
    num_bytes: int
    mtime_ns: int


class CacheIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Content and layout of a server's cache.

    Attributes:
        namespace: 16 bytes. Digest of everything that determines keys and values, and of the server's secret; tenants'
            namespaces are derived from it.
        page_bytes: Bytes of a host page, all groups together.
        shape: 16 bytes. Digest of the parsed configurations; a worker compares it with those that it has read.
        files: Of the weights; a worker compares them after it has read them.
    """

    namespace: bytes
    page_bytes: int
    shape: bytes
    files: tuple[FileStamp, ...]


class ModelSettings(Model, frozen=True, kw_only=True):
    """The model, the type of its weights, its device and its longest request."""

    dtype: DType
    max_model_len: int
    device: Device


class CacheSettings(Cache, frozen=True, kw_only=True):
    """The prefix cache and the sizes of its tiers."""

    kv_pages: int
    kv_dtype: KVDType
    window_pages: int
    snapshot_slots: int  # for snapshots of recurrent states, the padding slot included; 0 of models without
    tail_share: float
    tail_every: int
    page_size: int
    host_cache_gib: float

    @property
    def packs_rows(self) -> bool:
        """Whether rows are packed."""
        return self.kv_dtype == "fp8"

    @property
    def frees_windows(self) -> bool:
        """Whether layers with a window have pages of their own."""
        return self.window_pages > 0


class SchedulerSettings(Scheduler, frozen=True, kw_only=True):
    """Admission, and the largest step."""

    max_running_requests: int
    max_batched_tokens: int


class RunnerSettings(Runner, frozen=True, kw_only=True):
    """How steps are executed."""

    overlap: int
    graphs: Graphs
    cpu_threads: int
    grammar_threads: int


class SpecSettings(Spec, frozen=True, kw_only=True):
    """The proposer. ``spec_steps`` may still be ``auto``: the number of drafts is then chosen for each step."""

    @property
    def tiers(self) -> tuple[int, ...]:
        """Numbers of tokens that may be proposed at once, ascending."""
        if self.spec == "off":
            return (0,)
        return AUTO_TIERS if self.spec_steps == "auto" else (self.spec_steps,)

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens of each row in steps that verify so many, ascending; 1 is one that verifies none."""
        return tuple(sorted({1, *(1 + num_draft for num_draft in self.tiers)}))


class ServerSettings(Server, frozen=True, kw_only=True):
    """The HTTP surface and logging."""

    max_request_bytes: int


class Settings(Options, frozen=True, kw_only=True):
    """All values. Travels to the scheduler as the first message, and to each worker within its first."""

    model: ModelSettings
    cache: CacheSettings
    scheduler: SchedulerSettings
    runner: RunnerSettings
    spec: SpecSettings
    server: ServerSettings
    identity: CacheIdentity | None = None  # the cache's; None until ``identify`` computed it, which reads the weights

    @property
    def cache_identity(self) -> CacheIdentity:
        """The cache's identity, of settings that an engine runs with."""
        assert self.identity is not None, "an engine needs the cache's identity; call identify() first"
        return self.identity

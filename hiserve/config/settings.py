"""Settings: options where every ``auto`` has been replaced by a value, with the identity of the cache; they travel to every process."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import msgspec

from hiserve.config.caching import Cache, KVDType
from hiserve.config.options import AUTO_TIERS, Model, Options, Runner, Scheduler, Spec
from hiserve.config.serving import Server
from hiserve.errors import ConfigError

Device = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16", "float16", "float64"]
Graphs = Literal["off", "decode", "all"]
MAX_TREE_NODES = 63  # a node's mask is one number of 64 bits
_TREE = re.compile(r"([1-9][0-9]?)x([1-9][0-9]?):([1-9][0-9]?)")


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


class TreeShape(NamedTuple):
    """A tree of drafts; a chain is the tree of one candidate a level."""

    width: int  # candidates after a node, and nodes of a level that get candidates
    depth: int  # levels below the root, which is the last known token
    num_nodes: int  # nodes that are verified, the root included

    @property
    def num_candidates(self) -> int:
        """Candidates of all levels, of which the likeliest are verified."""
        return self.width + (self.depth - 1) * self.width**2

    @property
    def num_draft(self) -> int:
        """Nodes after the root."""
        return self.num_nodes - 1

    @classmethod
    def read(cls, text: str) -> TreeShape:
        """Reads a shape as ``--spec-tree`` gives it.

        Raises:
            ConfigError: It is no shape, or one that cannot be made.
        """
        if (found := _TREE.fullmatch(text)) is None:
            raise ConfigError(
                f"--spec-tree is {text!r}. Use off, auto, or WIDTHxDEPTH:NODES, such as 3x6:16.", param="spec_tree"
            )
        shape = cls(*map(int, found.groups()))
        limits = {
            f"a tree has 2 to {MAX_TREE_NODES} nodes": 2 <= shape.num_nodes <= MAX_TREE_NODES,
            f"its levels have {shape.num_candidates} candidates": shape.num_nodes - 1 <= shape.num_candidates,
            # The head computes them in the places that the nodes to verify are given.
            f"the head computes {shape.num_computed} candidates, and a tree has more nodes": (
                shape.num_computed < shape.num_nodes
            ),
        }
        if broken := [limit for limit, holds in limits.items() if not holds]:
            raise ConfigError(
                f"--spec-tree is {text}, but {broken[0]}. Use another number of nodes.", param="spec_tree"
            )
        return shape

    @property
    def num_computed(self) -> int:
        """Candidates that the head computes: all that get candidates themselves."""
        return self.width * (self.depth - 1)


AUTO_TREES = TreeShape(2, 4, 8), TreeShape(3, 6, 16)  # of ``auto``, beside ``AUTO_TIERS``; each has its own graphs


class SpecSettings(Spec, frozen=True, kw_only=True):
    """The proposer. ``spec_steps`` may still be ``auto``: the number of drafts is then chosen for each step."""

    @property
    def tiers(self) -> tuple[int, ...]:
        """Numbers of tokens that may be proposed at once, ascending; those of trees are last, and no chain has as many."""
        trees = tuple(tree.num_draft for tree in self.trees)
        return (*self.chains, *trees) or (0,)

    @property
    def chains(self) -> tuple[int, ...]:
        """Those of ``tiers`` for which drafts are chains."""
        if self.spec == "off" or self.spec_tree not in ("off", "auto"):
            return ()
        return AUTO_TIERS if self.spec_steps == "auto" else (self.spec_steps,)

    @property
    def trees(self) -> tuple[TreeShape, ...]:
        """The shapes of drafts that are trees, by their nodes; empty where all are chains."""
        if self.spec == "off" or self.spec_tree == "off":
            return ()
        return AUTO_TREES if self.spec_tree == "auto" else (TreeShape.read(self.spec_tree),)

    @property
    def max_depth(self) -> int:
        """The longest path of drafts, where they may be trees; 0 where all are chains."""
        return max((*self.chains, *(tree.depth for tree in self.trees))) if self.trees else 0

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

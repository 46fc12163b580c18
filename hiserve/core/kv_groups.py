"""KV groups: the content of a page's slots, by group of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import StrEnum

import msgspec

from hiserve.config.caching import Cache
from hiserve.config.options import DTYPE_BYTES
from hiserve.core.row_shapes import scale_words

ELEMENT_BYTES = DTYPE_BYTES | {"int32": 4, "uint8": 1}
_SCALES = "_scales"  # ends the name of a group of scales


class Space(StrEnum):
    """The pages that a group's rows lie in."""

    HISTORY = "history"  # pages of the whole prefix, freed by eviction
    WINDOW = "window"  # pages of what later tokens can still see, freed while the row runs
    ROW = "row"  # what a request carries along, by the number of its row: states, and rings of its last inputs


class CacheGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One group of layers that store rows of the same kind.

    A model is a list of groups; ordinary decoders have one, named ``kv``. A page holds
    ``page_size`` slots of every group, so that everything moves together.
    """

    name: str  # unique within the model
    num_layers: int  # layers in the group; a layer's index within the group is its slice
    num_kv_heads: int  # KV heads per layer
    head_dim: int
    dtype: str  # element type name, a key of ``ELEMENT_BYTES``
    # Content of a slot. ``kv``: one key and one value vector per KV head. ``token_position``: the token id as key, the
    # position as value. ``boundary``: the keys of a page are one vector, the hidden state of its last token; the first of
    # its values is 1 if the draft head has computed the page. ``latent``: one row for all heads, whose first ``value_dim``
    # elements are also the value. ``packed``: likewise, all of it, as bytes (``core.row_shapes``). ``heads``: as ``kv``, in 8 bits,
    # and ``scales``: their scales (``core.row_shapes.scale_words``). ``state``: of each head a matrix, ``[head_dim, value_dim]``.
    # ``inputs``: one vector.
    codec: str = "kv"
    space: Space = Space.HISTORY
    value_dim: int | None = None  # of ``latent``, ``packed``, ``scales`` and ``state``; None for the others
    ratio: int = 1  # tokens that a row stands for: a page of P tokens has P / ratio rows
    ring: int = 0  # of ``ROW``: the inputs of position p lie at ``p % ring``; 0 is a state
    snapshot_rows: int = 0  # of a ring: its newest rows that a request reads which is resumed at a boundary

    @property
    def num_planes(self) -> int:
        """Vectors of a token in a layer: key and value, or the one row that is both."""
        return 2 if self.value_dim is None and self.space is not Space.ROW else 1

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one row in this group, all layers together: of a token, or of ``ratio`` tokens; or of a whole state."""
        elements = math.prod((self.num_planes, self.num_layers, self.num_kv_heads, self.head_dim))
        if self.is_state:
            assert self.value_dim is not None, f"the state {self.name!r} has matrices of {self.head_dim} by nothing"
            elements *= self.value_dim
        return elements * self.element_bytes

    def page_rows(self, page_size: int) -> int:
        """Returns the rows of a page of so many tokens, a multiple of ``ratio``."""
        assert page_size % self.ratio == 0, f"rows of {self.ratio} tokens in pages of {page_size}"
        return page_size // self.ratio

    def page_bytes(self, page_size: int) -> int:
        """Returns the bytes of a page of so many tokens; 0 in ``ROW``, which has no pages."""
        return 0 if self.space is Space.ROW else self.page_rows(page_size) * self.slot_bytes

    @property
    def is_state(self) -> bool:
        """Whether it is a recurrent state, one of each row."""
        return self.space is Space.ROW and not self.ring

    @property
    def row_bytes(self) -> int:
        """Bytes that a request carries along in this group; 0 outside of ``ROW``."""
        return 0 if self.space is not Space.ROW else self.slot_bytes * (self.ring or 1)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of this group in a snapshot: the state, or the newest rows of the ring."""
        return self.slot_bytes if self.is_state else self.slot_bytes * self.snapshot_rows


class CachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of a model, and the place of each of its layers in them."""

    groups: tuple[CacheGroupSpec, ...]
    layers: tuple[tuple[str, int], ...]  # of each layer: name of its group, and index within it
    window: int = 0  # of the widest layer in ``WINDOW``; 0 without one
    # Of each layer: its groups besides that one, likewise; empty is none anywhere.
    beside: tuple[tuple[tuple[str, int], ...], ...] = ()

    def page_bytes(self, space: Space, page_size: int) -> int:
        """Returns the bytes of a page of so many tokens in the groups of a space."""
        return sum(group.page_bytes(page_size) for group in self.groups if group.space is space)

    @property
    def row_bytes(self) -> int:
        """Bytes that a request carries along in ``ROW``."""
        return sum(group.row_bytes for group in self.groups)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot: what a request reads of ``ROW`` that is resumed at a boundary."""
        return sum(group.snapshot_bytes for group in self.groups)

    @property
    def has_snapshots(self) -> bool:
        """Whether a request can be resumed only where there is a snapshot."""
        return self.snapshot_bytes > 0


def scales_of(group: str) -> str:
    """Returns the name of the group that has the scales of another."""
    return group + _SCALES


def pack_heads(groups: Iterable[CacheGroupSpec]) -> tuple[CacheGroupSpec, ...]:
    """Returns groups whose keys and values are in 8 bits, each with a group of their scales after it; others stay as they are."""
    packed: list[CacheGroupSpec] = []
    for group in groups:
        if group.codec != "kv":
            packed.append(group)
            continue
        words = scale_words(group.num_kv_heads)
        packed += [
            msgspec.structs.replace(group, codec="heads", dtype="uint8"),
            msgspec.structs.replace(
                group,
                name=scales_of(group.name),
                num_kv_heads=1,
                head_dim=words,
                value_dim=words,
                dtype="int32",
                codec="scales",
            ),
        ]
    return tuple(packed)


def rename(group: CacheGroupSpec, name: str) -> CacheGroupSpec:
    """Returns a group under the name of another, or as its scales."""
    return msgspec.structs.replace(group, name=scales_of(name) if group.codec == "scales" else name)


class CarriedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of what a request carries along in ``ROW``, by the element type of the model."""

    row: dict[str, int]  # of a request without drafts
    draft: dict[str, int]  # more for each draft that a step may verify
    snapshot: dict[str, int]


def carried_bytes(plan_of: Callable[[str, int], CachePlan]) -> CarriedBytes | None:
    """Returns the bytes of what a request carries along, if it does; ``plan_of`` takes an element type and drafts of a step."""
    plans = {dtype: (plan_of(dtype, 0), plan_of(dtype, 1)) for dtype in DTYPE_BYTES}
    if not any(plan.row_bytes for plan, _ in plans.values()):
        return None
    return CarriedBytes(
        row={dtype: plan.row_bytes for dtype, (plan, _) in plans.items()},
        draft={dtype: longer.row_bytes - plan.row_bytes for dtype, (plan, longer) in plans.items()},
        snapshot={dtype: plan.snapshot_bytes for dtype, (plan, _) in plans.items()},
    )


def page_hidden_group(size: int, page_size: int, dtype: str) -> CacheGroupSpec:
    """Returns the group of the hidden state at the end of each page, a vector of ``size`` elements, and a flag."""
    head_dim = max(1, -(-size // page_size))
    return CacheGroupSpec(
        name="boundary", num_layers=1, num_kv_heads=1, head_dim=head_dim, dtype=dtype, codec="boundary"
    )


CANARY = CacheGroupSpec(name="canary", num_layers=1, num_kv_heads=1, head_dim=1, dtype="int32", codec="token_position")


def debug_groups(cache: Cache) -> tuple[CacheGroupSpec, ...]:
    """Returns the groups that debugging adds to those of the model."""
    return (CANARY,) if cache.kv_canary else ()

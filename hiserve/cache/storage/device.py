"""The device pool: memory for every page of every KV group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hiserve.core.forward import GroupedKV, LayerKV, RowMemory
from hiserve.core.kv_groups import CacheGroupSpec, CachePlan, Space, scales_of


def storage_shape(group: CacheGroupSpec, num_pages: int, page_size: int) -> tuple[int, ...]:
    """Returns ``(num_layers, num_planes, num_slots, num_kv_heads, head_dim)``: layer-major, keys then values.

    A slot is a row of a page, of one token or of ``ratio``.

    Layer-major makes the slots of adjacent pages adjacent within a layer, so that a row whose
    pages are adjacent is one contiguous view there: CPU attention reads it without a gather.
    """
    return (
        group.num_layers,
        group.num_planes,
        num_pages * group.page_rows(page_size),
        group.num_kv_heads,
        group.head_dim,
    )


def row_shape(group: CacheGroupSpec, num_rows: int) -> tuple[int, ...]:
    """Returns the shape of what ``num_rows`` permanent rows carry along: that of one row is contiguous within a layer.

    Of rings ``(num_layers, num_rows, ring, n)``, of states ``(num_layers, num_rows, heads, head_dim, value_dim)``.
    """
    if group.is_state:
        assert group.value_dim is not None, f"the state {group.name!r} has no matrices"
        return (group.num_layers, num_rows, group.num_kv_heads, group.head_dim, group.value_dim)
    return (group.num_layers, num_rows, group.ring, group.num_kv_heads * group.head_dim)


def snapshot_shape(group: CacheGroupSpec, num_slots: int) -> tuple[int, ...]:
    """Returns the shape of so many snapshots, slot 0 included: of states as ``row_shape``, of rings their newest rows."""
    if group.is_state:
        return row_shape(group, num_slots)
    return (group.num_layers, num_slots, group.snapshot_rows, group.num_kv_heads * group.head_dim)


def layer_views(storage: Tensor, group: CacheGroupSpec, page_size: int) -> tuple[LayerKV, ...]:
    """Returns the keys and values of each layer of a group, as views of its storage."""
    page_rows = group.page_rows(page_size)
    return tuple(LayerKV(k=planes[0], v=planes[-1][..., : group.value_dim], page_rows=page_rows) for planes in storage)


class DevicePool:
    """Pages on the device. Page 0 is the padding page, which padded rows write; it is never allocated.

    Args:
        groups: The model's KV groups; names are unique.
        num_pages: Pages, the padding page included.
        page_size: Tokens per page.
        device: ``cpu`` or ``cuda``.
        num_window_pages: Pages of the groups in ``Space.WINDOW``, their padding page included.
        num_rows: Permanent rows, row 0 included, of the groups in ``Space.ROW``.
        num_snapshots: Snapshots of these groups, slot 0 included.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroupSpec],
        num_pages: int,
        page_size: int,
        device: str,
        num_window_pages: int = 0,
        num_rows: int = 0,
        num_snapshots: int = 1,
    ) -> None:
        self._groups, self._page_size = groups, page_size
        self._storages: dict[str, Tensor] = {}
        self._layers: dict[str, tuple[LayerKV, ...]] = {}
        self._snapshots: dict[str, Tensor] = {}
        scales = {group.name for group in groups if group.codec == "scales"}
        for group in groups:
            assert group.name not in self._storages, f"two KV groups are named {group.name!r}"
            count = num_window_pages if group.space is Space.WINDOW else num_pages
            is_row = group.space is Space.ROW
            shape = row_shape(group, num_rows) if is_row else storage_shape(group, count, page_size)
            # Not cleared: unallocated pages may hold any bytes, and touching them all would take seconds.
            storage = torch.empty(shape, dtype=getattr(torch, group.dtype), device=device)
            self._storages[group.name] = storage
            if is_row:
                self._snapshots[group.name] = storage.new_empty(snapshot_shape(group, num_snapshots))
            if not is_row:
                self._layers[group.name] = layer_views(storage, group, page_size)
        for name in [each.name for each in groups if scales_of(each.name) in scales]:
            pairs = zip(self._layers[name], self._layers[scales_of(name)], strict=True)
            self._layers[name] = tuple(replace(kv, scales=of_heads.k[:, 0]) for kv, of_heads in pairs)

    def clear(self, num_pages: int, num_rows: int) -> None:
        """Writes zeros into the first pages of each group, the padding page included, and into what the first rows carry along."""
        for group in self._groups:
            if group.space is Space.ROW:
                self._storages[group.name][:, :num_rows].zero_()
            else:
                self._storages[group.name][:, :, : num_pages * group.page_rows(self._page_size)].zero_()

    @property
    def num_bytes(self) -> int:
        """Memory of all groups."""
        return sum(each.nbytes for each in (*self._storages.values(), *self._snapshots.values()))

    def layers(self, group: str) -> tuple[LayerKV, ...]:
        """Returns the views of a group's layers, in order."""
        return self._layers[group]

    def model_layers(self, plan: CachePlan) -> tuple[LayerKV, ...]:
        """Returns the views of a model's layers, in order; those of layers with several groups have all of these."""
        if not plan.beside:
            return tuple(self._layers[group][index] for group, index in plan.layers)
        return tuple(self._grouped(first, beside) for first, beside in zip(plan.layers, plan.beside, strict=True))

    def _grouped(self, first: tuple[str, int], others: Sequence[tuple[str, int]]) -> GroupedKV:
        group, index = first
        own = self._layers[group][index] if group in self._layers else LayerKV(*[self._storages[group][index]] * 2)
        places = (first, *others)
        return GroupedKV(
            k=own.k,
            v=own.v,
            scales=own.scales,
            page_rows=own.page_rows,
            beside={name: self._memory(name, index) for name, index in others},
            snapshots={name: self._snapshots[name][index] for name, index in places if name in self._snapshots},
        )

    def _memory(self, group: str, index: int) -> Tensor:
        """Returns a layer's memory in a group, as in ``GroupedKV``."""
        return self._layers[group][index].k[:, 0] if group in self._layers else self._storages[group][index]

    @property
    def carried(self) -> Mapping[str, RowMemory]:
        """What rows carry along, and the snapshots, by group."""
        return {name: RowMemory(self._storages[name], kept) for name, kept in self._snapshots.items()}

    def storage(self, group: str) -> Tensor:
        """Returns all memory of a group; see ``storage_shape`` and ``row_shape``."""
        return self._storages[group]

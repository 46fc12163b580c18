"""The image of a snapshot on the host: all layers of its groups behind each other, cut into frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiserve.core.forward import RowMemory
from hiserve.core.kv_groups import CacheGroupSpec, Space
from hiserve.core.plan import Int32Array

ALIGNMENT = 64  # bytes, of each group within an image


class SnapshotImage:
    """Offsets within the image of a snapshot.

        image   group | group | ...
        group   layer 0 | layer 1 | ...     what a slot holds of each layer

    Attributes:
        groups: Those that a snapshot has a part of.
        num_bytes: Of an image; 0 of a model without snapshots.
    """

    def __init__(self, groups: Sequence[CacheGroupSpec]) -> None:
        self.groups = tuple(each for each in groups if each.space is Space.ROW and each.snapshot_bytes)
        self._offsets: dict[str, int] = {}
        self.num_bytes = 0
        for group in self.groups:
            self._offsets[group.name] = self.num_bytes
            self.num_bytes += -(-group.snapshot_bytes // ALIGNMENT) * ALIGNMENT

    def frames_of(self, frame_bytes: int) -> int:
        """Returns how many frames of so many bytes hold an image."""
        return -(-self.num_bytes // frame_bytes)

    def parts(self, image: Tensor, carried: Mapping[str, RowMemory], slot: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields what a slot holds of each group, layers first, and the part of an image for it (uint8 ``[num_bytes]``)."""
        for group in self.groups:
            kept, start = carried[group.name].snapshots[:, slot], self._offsets[group.name]
            part = image[start : start + group.snapshot_bytes]
            yield kept, part.view(kept.dtype).view(kept.shape)

    def runs(
        self, carried: Mapping[str, RowMemory], slot: int, frames: Int32Array, frame_bytes: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
        """Returns the pieces of a snapshot that are contiguous on both sides.

        Args:
            carried: Of each group, its snapshots.
            slot: On the device.
            frames: int32 ``[f]``. Host pages that hold the image.
            frame_bytes: Of each.

        Returns:
            uint64 ``[n]`` addresses on the device, uint64 ``[n]`` bytes from the first host page, and uint64 ``[n]`` sizes.
        """
        addresses, offsets, sizes = list[int](), list[int](), list[int]()
        for group in self.groups:
            kept, at = carried[group.name].snapshots, self._offsets[group.name]
            layer_bytes = group.snapshot_bytes // group.num_layers
            for layer in range(group.num_layers):
                address, end = kept[layer, slot].data_ptr(), at + layer_bytes
                while at < end:
                    index, within = divmod(at, frame_bytes)
                    size = min(end - at, frame_bytes - within)
                    addresses.append(address)
                    offsets.append(int(frames[index]) * frame_bytes + within)
                    sizes.append(size)
                    address, at = address + size, at + size
        return tuple(np.array(each, dtype=np.uint64) for each in (addresses, offsets, sizes))  # type: ignore[return-value]


def empty_image(num_bytes: int) -> Tensor:
    """Returns memory for an image on the CPU, uint8 ``[num_bytes]``; what no group fills is 0."""
    return torch.zeros(num_bytes, dtype=torch.uint8)

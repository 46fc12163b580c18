"""The host pool: pages of all groups and layers in one segment that outlives this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiserve.cache.storage.checksums import Checksums, page_checksum
from hiserve.cache.storage.prefault import Prefault, Registrar
from hiserve.cache.storage.records import NO_CHECKSUM, Records
from hiserve.cache.storage.segment import PageLayout, Segment
from hiserve.config.caching import CacheVerify
from hiserve.core.digest import Chain, chain
from hiserve.core.forward import LayerKV, RowMemory
from hiserve.core.kv_groups import CacheGroupSpec, Space
from hiserve.core.plan import Int32Array, Int64Array
from hiserve.core.transfers import PageRun, TailImage

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


class HostPool:
    """Pages on the host, page-major: a page is contiguous. Page 0 is unused.

    Right after construction either ``recover`` or ``clear`` must be called, before any other use of records.

    Args:
        segment: Holds the pages; the caller closes it after the pool.
        groups: The model's KV groups, as when the segment was made.
        registrar: Pins the memory; None without a device.
        num_threads: Threads that make the memory resident.
        max_checksum_bytes_per_s: Bound on the checksum thread's reads.
        verify: Pages that ``is_intact`` checks: ``store``, those of a former process, once; ``all``; or ``off``, none.
        link: Computes the digests of pages (``core.digest.chain_of``).

    Attributes:
        layout: Offsets within a page.
        window_layout: Offsets within the image of a window page, which lies in frames: host pages, anywhere in the pool.
        snapshot_image: Offsets within the image of a snapshot, likewise.
        prefault: Prepares pages. If the memory is pinned, no copy may span two of its pieces.
        records: State of each page.
    """

    def __init__(
        self,
        segment: Segment,
        groups: Sequence[CacheGroupSpec],
        *,
        registrar: Registrar | None = None,
        num_threads: int = 4,
        max_checksum_bytes_per_s: float = 2e9,
        verify: CacheVerify = "store",
        link: Chain = chain,
    ) -> None:
        page_size = segment.layout.page_size
        self.layout = PageLayout([each for each in groups if each.space is Space.HISTORY], page_size)
        self.window_layout = PageLayout([each for each in groups if each.space is Space.WINDOW], page_size)
        self.snapshot_image = SnapshotImage(groups)
        expected, found = self.layout.page_bytes, segment.layout.page_bytes
        assert expected == found, f"pages of {expected} bytes, the segment's have {found}"
        self._pages = segment.pages
        self._bytes = torch.from_numpy(segment.pages)
        self.records = records = Records(segment.records, segment.layout.page_size, link)
        # A closure over the records, not over this pool: a cycle would keep the segment's memory until garbage collection.
        self.prefault = Prefault(
            segment, num_threads=num_threads, registrar=registrar, num_used=lambda: records.num_used
        )
        self._checksums = Checksums(self.records, segment.pages, max_bytes_per_s=max_checksum_bytes_per_s)
        self._layers = {group.name: page_views(self._bytes, self.layout, group) for group in self.layout.groups}
        self._verify = verify
        self._is_foreign = np.zeros(self.num_pages, dtype=np.bool_)  # written by a former process, and not verified yet

    @property
    def num_pages(self) -> int:
        """Pages in the pool, page 0 included."""
        return len(self._pages)

    @property
    def num_ready_pages(self) -> int:
        """Pages below this may be copied to and from; recovered ones above it must wait."""
        return self.prefault.num_ready_pages

    def page(self, page: int) -> Tensor:
        """Returns a page as uint8 ``[page_bytes]``, on the CPU, without copying."""
        return self._bytes[page]

    def span(self, first: int, end: int) -> Tensor:
        """Returns adjacent pages as uint8 ``[end - first, page_bytes]``, on the CPU, without copying."""
        return self._bytes[first:end]

    def buffer(self, page: int) -> memoryview:
        """Returns a page as bytes to read into or write from, without copying."""
        return memoryview(self._pages[page])

    def layers(self, group: str) -> tuple[LayerKV, ...]:
        """Returns the views of a group's layers, in order.

        Here ``k`` and ``v`` are ``[num_pages, page_size, num_kv_heads, head_dim]``, strided by whole pages;
        ``k[page]`` is contiguous.
        """
        return self._layers[group]

    @property
    def frames_per_page(self) -> int:
        """Host pages that the image of a window page takes."""
        return self.window_layout.frames_of(self.layout.page_bytes)

    @property
    def frames_per_snapshot(self) -> int:
        """Host pages that the image of a snapshot takes."""
        return self.snapshot_image.frames_of(self.layout.page_bytes)

    def images(self, frames: Int32Array) -> Tensor:
        """Returns copies of the images of window pages in frames, uint8 ``[n, frames_per_page * page_bytes]``."""
        return self.contents(frames).view(-1, self.frames_per_page * self.layout.page_bytes)

    def contents(self, frames: Int32Array) -> Tensor:
        """Returns a copy of the bytes in frames, uint8 ``[n, page_bytes]``."""
        return self._bytes[torch.from_numpy(frames).long()]

    def put_images(self, frames: Int32Array, images: Tensor) -> None:
        """Writes images into frames, all of whose bytes they have; see ``images`` and ``contents``."""
        self._bytes.index_copy_(0, torch.from_numpy(frames).long(), images.view(-1, self.layout.page_bytes))

    def read_frames(self, frames: Int32Array) -> memoryview:
        """Returns a copy of the bytes in frames, behind each other."""
        return np.take(self._pages, frames, axis=0).reshape(-1).data

    def write_frames(self, frames: Int32Array, content: memoryview) -> None:
        """Writes bytes into frames, all of which they fill."""
        self.put_images(frames, torch.frombuffer(content, dtype=torch.uint8))

    def begin(self, run: PageRun) -> None:
        """Declares a copy into pages that are FREE."""
        self.records.begin(run)
        self._is_foreign[run.pages] = False

    def begin_tail(self, image: TailImage) -> None:
        """Declares a copy of a tail into frames that are FREE."""
        self.records.begin_tail(image)
        self._is_foreign[image.frames] = False

    def finish(self, pages: Int32Array) -> None:
        """Declares that all bytes of these pages have arrived; their checksums follow in the background."""
        self.records.finish(pages)
        self._checksums.add(pages)

    def retain(self, pages: Int32Array, until_s: Int64Array) -> None:
        """Records until when each of these pages is retained, int64 ``[n]``, for the process that recovers them."""
        self.records.retain(pages, until_s)

    def free(self, pages: Int32Array) -> None:
        """Frees pages, if they were begun; no copy from or to them may be running."""
        self.records.free(pages[self.records.in_use(pages)])

    def recover(self) -> list[PageRun]:
        """Recovers the pages of a former process; see ``Records.recover``. Call ``is_intact`` before each use."""
        runs = self.records.recover()
        for pages in (*(run.pages for run in runs), *(tail.frames for tail in self.tails())):
            self._is_foreign[pages] = True
        return runs

    def tails(self) -> list[TailImage]:
        """Returns the tails that ``recover`` has found."""
        return self.records.tails()

    def clear(self) -> None:
        """Frees every page."""
        self.records.clear()

    def is_intact(self, pages: Int32Array) -> bool:
        """Whether the bytes of VALID pages are unchanged, as far as ``verify`` requires a check.

        A page that this process wrote and that has no checksum yet passes.
        """
        if self._verify == "off":
            return True
        due = pages if self._verify == "all" else pages[self._is_foreign[pages]]
        for page in due.tolist():
            is_unsealed = not self._is_foreign[page] and self.records.checksum(page) == NO_CHECKSUM
            if not is_unsealed and not self.verify(page):
                return False
            self._is_foreign[page] = False
        return True

    def verify(self, page: int) -> bool:
        """Returns whether a page has a checksum and its bytes match it. Reads the whole page."""
        checksum = self.records.checksum(page)
        return checksum != NO_CHECKSUM and checksum == page_checksum(self.buffer(page), self.records.digest(page))

    def wait_checksums(self, timeout_s: float) -> bool:
        """Waits until the checksum thread has handled every finished page (at shutdown: all can be recovered)."""
        return self._checksums.wait(timeout_s)

    def wait_sealed(self, pages: Int32Array, timeout_s: float) -> bool:
        """Waits until these VALID pages have checksums; returns whether they do."""
        return self._checksums.wait_for(pages, timeout_s)

    def close(self) -> None:
        """Stops the threads and unpins the memory; no copy may be running. The pages' content stays."""
        self._checksums.close()
        self.prefault.close()


def page_views(pages: Tensor, layout: PageLayout, group: CacheGroupSpec) -> tuple[LayerKV, ...]:
    """Returns the views of a group's layers in pages, uint8 ``[n, num_bytes]`` of one layout; see ``HostPool.layers``."""
    typed = pages.view(getattr(torch, group.dtype))
    shape = (pages.shape[0], group.page_rows(layout.page_size), group.num_kv_heads, group.head_dim)
    strides = (typed.stride(0), group.num_kv_heads * group.head_dim, group.head_dim, 1)
    offsets = (layout.offsets[group.name] // typed.element_size()).tolist()
    return tuple(
        LayerKV(
            k=typed.as_strided(shape, strides, planes[0]),
            v=typed.as_strided(shape, strides, planes[-1])[..., : group.value_dim],
        )
        for planes in offsets
    )

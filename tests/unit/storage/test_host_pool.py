"""The host pool: views of one page, and the life of pages across restarts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.segment import PageLayout, Segment, SegmentLayout
from hiserve.config.caching import CacheVerify
from hiserve.core.kv_groups import CacheGroupSpec
from hiserve.core.transfers import TailImage
from tests.helpers.host import NAMESPACE, TENANTS, content, make_run, told
from tests.helpers.waiting import PATIENCE_S

PAGE_SIZE = 4
NUM_PAGES = 12
GROUPS = (
    CacheGroupSpec(name="kv", num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32"),
    CacheGroupSpec(name="draft", num_layers=1, num_kv_heads=1, head_dim=5, dtype="float16"),
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def segment() -> Iterator[Segment]:
    layout = SegmentLayout(NAMESPACE, PAGE_SIZE, PageLayout(GROUPS, PAGE_SIZE).page_bytes, NUM_PAGES)
    made = Segment.anonymous(layout)
    yield made
    made.close()


@pytest.fixture
def pool(segment: Segment) -> Iterator[HostPool]:
    made = HostPool(segment, GROUPS)
    made.clear()
    yield made
    made.close()


def write(pool: HostPool, pages: list[int], tokens: list[int]) -> np.ndarray:
    run = make_run(pages, tokens, page_size=PAGE_SIZE)
    pool.begin(run)
    for page, digest in zip(pages, run.digests, strict=True):
        pool.buffer(page)[:] = content(digest, pool.layout.page_bytes).data
    pool.finish(run.pages)
    return run.pages


def test_every_layer_of_a_page_has_keys_and_values_of_its_own(pool: HostPool) -> None:
    planes = [plane for group in GROUPS for kv in pool.layers(group.name) for plane in (kv.k, kv.v)]
    assert [tuple(plane.shape) for plane in planes] == [(12, 4, 2, 8)] * 6 + [(12, 4, 1, 5)] * 2
    assert {plane.dtype for plane in planes[:6]} == {torch.float32}
    assert {plane.dtype for plane in planes[6:]} == {torch.float16}
    for mark, plane in enumerate(planes):
        plane[:] = 100 * torch.arange(NUM_PAGES)[:, None, None, None] + mark
    for page in range(NUM_PAGES):
        assert [plane[page].unique().tolist() for plane in planes] == [[100 * page + mark] for mark in range(8)]


def test_the_pieces_of_a_page_are_contiguous_and_where_the_layout_says(pool: HostPool) -> None:
    for group in GROUPS:
        for layer, kv in enumerate(pool.layers(group.name)):
            for plane, view in enumerate((kv.k, kv.v)):
                piece = view[7]
                assert piece.is_contiguous()
                offset = int(pool.layout.offsets[group.name][layer, plane])
                assert piece.data_ptr() == pool.page(7).data_ptr() + offset
                assert piece.nbytes == pool.layout.piece_bytes(group)


def test_pages_of_a_device_pool_survive_the_way_there_and_back(pool: HostPool) -> None:
    """One gather and one scatter a layer, in the shape of a copy between tiers."""
    device = DevicePool(GROUPS, NUM_PAGES, PAGE_SIZE, "cpu")
    host_pages, device_pages, back = torch.tensor([3, 9, 4]), torch.tensor([5, 1, 8]), torch.tensor([2, 11, 6])
    for group in GROUPS:
        shape = (NUM_PAGES, PAGE_SIZE, group.num_kv_heads, group.head_dim)
        for near, far in zip(device.layers(group.name), pool.layers(group.name), strict=True):
            for one, other in ((near.k, far.k), (near.v, far.v)):
                one.copy_(torch.randn_like(one))
                other[host_pages] = one.view(shape)[device_pages]
                one.view(shape)[back] = other[host_pages]
                assert torch.equal(one.view(shape)[back], one.view(shape)[device_pages])


def test_page_and_buffer_are_the_memory_of_the_segment(pool: HostPool, segment: Segment) -> None:
    pool.page(3)[:] = 5
    assert (segment.pages[3] == 5).all()
    pool.buffer(3)[0:2] = b"ab"
    assert pool.page(3)[:3].tolist() == [97, 98, 5]
    assert pool.buffer(3).nbytes == pool.layout.page_bytes
    assert segment.pages[2].sum() == segment.pages[4].sum() == 0


def test_groups_that_the_segment_was_not_made_for_are_our_own_fault(segment: Segment) -> None:
    with pytest.raises(AssertionError, match="pages of 1536 bytes, the segment's have"):
        HostPool(segment, GROUPS[:1])


def test_pages_become_ready_in_the_background(pool: HostPool) -> None:
    assert pool.prefault.wait(NUM_PAGES, 10)
    assert pool.num_ready_pages == pool.num_pages == NUM_PAGES


def test_the_next_worker_adopts_finished_pages_and_verifies_them(pool: HostPool, segment: Segment) -> None:
    write(pool, [3, 5], [1, 2])
    pool.begin(make_run([6], [3]))
    assert pool.wait_checksums(10)
    pool.close()

    after = HostPool(Segment.attach(segment.fd), GROUPS)
    runs = after.recover()
    assert list(told(runs)) == [3, 5]
    assert after.verify(3)
    assert after.verify(5)
    after.buffer(5)[100] ^= 1
    assert not after.verify(5)
    assert after.verify(3)
    after.close()


@pytest.mark.parametrize(("verify", "is_read", "is_read_again"), [("store", 1, 0), ("all", 1, 1), ("off", 0, 0)])
def test_pages_of_a_former_process_are_read_before_their_first_use(
    pool: HostPool, segment: Segment, verify: CacheVerify, is_read: int, is_read_again: int
) -> None:
    pages = write(pool, [3, 5], [1, 2])
    assert pool.wait_checksums(10)
    pool.close()
    after = HostPool(Segment.attach(segment.fd), GROUPS, verify=verify)
    after.recover()
    after.buffer(5)[100] ^= 1
    assert after.is_intact(pages) == (not is_read)
    after.buffer(5)[100] ^= 1
    assert after.is_intact(pages)
    after.buffer(3)[100] ^= 1
    assert after.is_intact(pages) == (not is_read_again)
    after.close()


def test_pages_that_this_process_wrote_are_trusted_unless_all_are_to_be_read(segment: Segment) -> None:
    for verify, is_trusted in (("store", True), ("all", False)):
        pool = HostPool(segment, GROUPS, verify=verify)  # type: ignore[arg-type]
        pool.clear()
        pages = write(pool, [3], [1])
        assert pool.wait_checksums(10)
        pool.buffer(3)[0] ^= 1
        assert pool.is_intact(pages) == is_trusted
        pool.close()


def test_an_adopted_page_that_is_written_anew_is_foreign_no_more(pool: HostPool, segment: Segment) -> None:
    write(pool, [3], [1])
    assert pool.wait_checksums(10)
    pool.close()
    after = HostPool(Segment.attach(segment.fd), GROUPS, max_checksum_bytes_per_s=1e-3)
    after.recover()
    after.free(np.array([3], dtype=np.int32))
    write(after, [4], [3])  # keeps the thread busy for a long time
    assert after.is_intact(write(after, [3], [2]))
    after.close()


def test_a_page_without_a_checksum_does_not_verify(segment: Segment) -> None:
    pool = HostPool(segment, GROUPS, max_checksum_bytes_per_s=1e-3)
    pool.clear()
    write(pool, [3], [1])
    pages = write(pool, [4], [2])
    assert not pool.verify(4)
    pool.free(pages)
    pool.close()


def test_a_page_whose_bytes_belong_to_another_prefix_does_not_verify(pool: HostPool) -> None:
    write(pool, [3], [1])
    write(pool, [4], [2])
    assert pool.wait_checksums(10)
    pool.page(3).copy_(pool.page(4))
    pool.records._table["checksum"][3] = pool.records.checksum(4)
    assert not pool.verify(3)


def test_a_closed_pool_that_nobody_names_is_freed_at_once(segment: Segment) -> None:
    """A segment may take most of the machine's memory: it must not wait for the garbage collector."""
    gc.disable()
    try:
        pool = HostPool(Segment.attach(segment.fd), GROUPS)
        pool.clear()
        known = weakref.ref(pool)
        pool.close()
        del pool
        assert known() is None
    finally:
        gc.enable()


def test_frames_of_a_former_process_are_verified_until_they_are_written_again(segment: Segment) -> None:
    former = HostPool(segment, GROUPS)
    former.clear()
    write(former, [3], [7])
    digest = make_run([3], [7], page_size=PAGE_SIZE).digests[0]
    image = TailImage(np.array([5, 6], dtype=np.int32), TENANTS[0], digest)
    former.begin_tail(image)
    former.finish(image.frames)
    assert former.wait_checksums(PATIENCE_S)
    former.close()
    pool = HostPool(segment, GROUPS)
    pool.recover()
    pool.buffer(6)[0] ^= 1
    assert [tail.frames.tolist() for tail in pool.tails()] == [[5, 6]]
    assert pool.is_intact(image.frames[:1]) and not pool.is_intact(image.frames)
    pool.free(image.frames)
    pool.begin_tail(image)
    pool.records.finish(image.frames)  # no checksum yet
    assert pool.is_intact(image.frames)
    pool.close()

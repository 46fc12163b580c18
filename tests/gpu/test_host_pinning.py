"""Host pages pinned through CUDA: copies do not wait, and refusals are told."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from hiserve.cache.storage.prefault import CudaRegistrar, Prefault
from hiserve.cache.storage.segment import Segment
from hiserve.errors import ResourceError
from tests.helpers.host import make_layout

pytestmark = pytest.mark.gpu

NUM_PAGES, PAGE_BYTES = 200, 5 * 4096 + 64


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.anonymous(make_layout(NUM_PAGES, page_bytes=PAGE_BYTES))
    yield made
    made.close()


def test_every_page_of_a_segment_is_pinned_while_the_pool_lives(segment: Segment) -> None:
    prefault = Prefault(segment, registrar=CudaRegistrar(0), piece_bytes=1)
    assert prefault.wait(NUM_PAGES, 60)
    assert prefault.num_pieces > 1
    pages = torch.from_numpy(segment.pages)
    assert all(pages[page].is_pinned() and pages[page][-1:].is_pinned() for page in range(NUM_PAGES))
    prefault.close()
    assert not any(pages[page].is_pinned() for page in range(NUM_PAGES))


def test_bytes_make_the_way_there_and_back_from_any_thread(segment: Segment) -> None:
    prefault = Prefault(segment, registrar=CudaRegistrar(0), piece_bytes=1)
    assert prefault.wait(NUM_PAGES, 60)
    pages = torch.from_numpy(segment.pages)
    pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    before = pages.clone()
    device = torch.stack([pages[page].to("cuda", non_blocking=True) for page in range(NUM_PAGES)])
    torch.cuda.current_stream().synchronize()  # the copies read the pages still
    pages.zero_()
    for page in range(NUM_PAGES):
        pages[page].copy_(device[page], non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(pages, before)
    prefault.close()


def test_the_memory_of_a_dead_worker_can_be_pinned_again(segment: Segment) -> None:
    for _ in range(2):
        prefault = Prefault(segment, registrar=CudaRegistrar(0))
        assert prefault.wait(NUM_PAGES, 60)
        prefault.close()


def test_a_refusal_is_told_and_leaves_the_device_well(segment: Segment) -> None:
    registrar = CudaRegistrar(0)
    address = segment.pages.ctypes.data
    registrar.register(address, 4096)
    prefault = Prefault(segment, registrar=registrar)
    assert not prefault.wait(1, 60)
    assert isinstance(prefault.failure, ResourceError)
    assert re.search(
        r"needs 0.00.* GiB .*cannot be pinned.*already mapped.*ulimit -l.*--host-cache-gib", str(prefault.failure)
    )
    assert torch.ones(5, device="cuda").sum().tolist() == 5
    prefault.close()
    registrar.unregister(address)


def test_a_copy_across_two_pieces_is_refused_by_cuda(segment: Segment) -> None:
    """Why copies must be cut at ``pages_per_piece``."""
    prefault = Prefault(segment, registrar=CudaRegistrar(0), piece_bytes=1)
    assert prefault.wait(NUM_PAGES, 60)
    pages = torch.from_numpy(segment.pages)
    device = torch.empty(pages.shape, dtype=torch.uint8, device="cuda")
    edge = prefault.pages_per_piece
    device[:edge].copy_(pages[:edge], non_blocking=True)
    with pytest.raises(RuntimeError, match="invalid argument"):
        device.copy_(pages, non_blocking=True)
    prefault.close()

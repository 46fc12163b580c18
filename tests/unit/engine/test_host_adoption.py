"""The host pages of a former group by which its ranks agree: those with one number and one content (S9)."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.storage.records import Records, record_type
from hiserve.core.digest import chain
from hiserve.core.transfers import PageRun, TailImage
from hiserve.engine.host_adoption import common_pages
from hiserve.engine.rank_messages import HeldPages

PAGE, NUM_PAGES = 4, 12
ROOT = bytes(16)


def held(*pages: int, rank: int = 0) -> HeldPages:
    """Pages of an unbranched prefix, in this order, then a tail of the next two."""
    records = Records(np.zeros(NUM_PAGES, dtype=record_type(PAGE)), PAGE)
    records.clear()
    numbers = np.array(pages, dtype=np.int32)
    key = np.arange(PAGE * len(pages), dtype="<i4").tobytes()
    digests = chain(ROOT, key, PAGE)
    records.begin(PageRun(numbers, ROOT, ROOT, digests, key))
    frames = np.array([9, 10], dtype=np.int32)[:: 1 - 2 * rank]
    records.begin_tail(TailImage(np.ascontiguousarray(frames), ROOT, digests[0], 0))
    everything = np.sort(np.concatenate((numbers, frames)))
    return HeldPages(everything, records.identities(everything))


@pytest.mark.parametrize(
    ("others", "common"),
    [
        ([held(3, 1, 5)], [1, 3, 5, 9, 10]),
        ([held(3, 1)], [1, 3, 9, 10]),
        ([held(3, 5, 1)], [3, 9, 10]),  # the second and third page under other numbers
        ([held(3, 1, 5, rank=1)], [1, 3, 5]),  # frames of the tail in another order
        ([held(3, 1, 5), held(3, 4, 5, rank=1)], [3, 5]),
        ([HeldPages(np.empty(0, dtype=np.int32), held(3).identities[:0])], []),
    ],
)
def test_ranks_agree_on_pages_that_all_hold_alike(others: list[HeldPages], common: list[int]) -> None:
    pages = common_pages([held(3, 1, 5), *others])
    assert pages.tolist() == common and pages.dtype == np.int32

"""The host pages of a former group that its successor adopts: those that every rank has, under one number and with one digest."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import numpy as np

from hiserve.cache.storage.host import HostPool
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import PageRun, TailImage
from hiserve.engine.rank_messages import HeldPages

TOUCH_TIMEOUT_S = 600.0  # for the memory of recovered pages to be made ready


def find_pages(host: HostPool) -> tuple[list[PageRun], list[TailImage]]:
    """Returns the pages of a former process, of history and of tails, once their memory is ready; none where it cannot be had any more.

    ``host`` was just made: its records must not have been used.
    """
    runs = host.recover()
    tails = host.tails()
    last = int(_numbers(runs, tails).max(initial=0))
    if runs and not host.prefault.wait(1 + last, TOUCH_TIMEOUT_S):
        host.clear()
        return [], []
    return runs, tails


def hold_pages(host: HostPool) -> HeldPages:
    """Returns the pages of ``find_pages``, by which ranks agree."""
    pages = _numbers(*find_pages(host))
    return HeldPages(pages, host.records.identities(pages))


def common_pages(held: Iterable[HeldPages]) -> Int32Array:
    """Returns the pages that all of several ranks hold alike, in order."""
    return reduce(_common, held).pages


def keep_pages(host: HostPool, held: HeldPages, pages: Int32Array) -> None:
    """Frees the pages that were recovered, but for these."""
    host.free(np.setdiff1d(held.pages, pages, assume_unique=True))


def _numbers(runs: list[PageRun], tails: list[TailImage]) -> Int32Array:
    """Returns the numbers of pages, in order."""
    return np.sort(
        np.concatenate([np.empty(0, dtype=np.int32), *(run.pages for run in runs), *(tail.frames for tail in tails)])
    )


def _common(one: HeldPages, other: HeldPages) -> HeldPages:
    pages, ours, theirs = np.intersect1d(one.pages, other.pages, assume_unique=True, return_indices=True)
    identities = one.identities[ours]
    is_same = (identities == other.identities[theirs]).all(1)
    return HeldPages(pages[is_same], identities[is_same])

"""The size of the pool of layers with a window, beside that of the other layers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hiserve.config.serving import Auto
from hiserve.core.machine import GIB
from hiserve.core.windows import WindowLimits, tail_interval
from hiserve.errors import ConfigError, ResourceError

# Of the memory of both pools: the share of window pages, within bounds, by the tokens of history for each tail.
TAIL_TOKENS, LEAST_SHARE, MOST_SHARE = 1500, 1 / 8, 2 / 3


def plan_windows(given: int | Auto, obstacles: Sequence[str]) -> bool:
    """Returns whether layers with a window have pages of their own.

    Args:
        given: ``--window-pages``.
        obstacles: Reasons why they cannot.

    Raises:
        ConfigError: They are asked for, and cannot.
    """
    if obstacles and given not in ("auto", 0):
        raise ConfigError(
            f"--window-pages is {given}, for layers with pages of their own, but {obstacles[0]}. Leave --window-pages out.",
            param="window_pages",
        )
    return not obstacles and given != 0


class WindowPool(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of layers with a window."""

    limits: WindowLimits | None  # None without such a pool
    slot_elements: int  # elements of a token in these layers
    element_bytes: int
    share: float | Auto = "auto"  # ``--tail-share``

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 0 without a pool."""
        return 0 if self.limits is None else self.limits.page_size * self.slot_elements * self.element_bytes

    def image_bytes(self, page_bytes: int) -> int:
        """Returns the bytes of a page on the host, where it takes whole pages of the other layers; 0 without a pool."""
        return -(-self.page_bytes // page_bytes) * page_bytes

    def tail_share(self, page_bytes: int) -> float:
        """Returns the share of window pages in the memory of both pools; 0 without them.

        Under ``auto`` it is t / (t + 1500 h): t bytes of a tail, h of the history of a token. This was the best share in
        simulated traffic of chats and agents.

        Args:
            page_bytes: Of a page of the other layers.
        """
        if self.limits is None:
            return 0.0
        if self.share != "auto":
            return self.share
        tail = self.limits.tail_pages * self.page_bytes
        history = page_bytes / self.limits.page_size
        return min(MOST_SHARE, max(LEAST_SHARE, tail / (tail + TAIL_TOKENS * history)))

    def tail_every(self, given: int | Auto, page_bytes: int) -> int:
        """Returns the tokens between two tails of a prompt, whole pages; 0 is none between, or no window pages.

        Args:
            given: ``--tail-every``.
            page_bytes: As in ``tail_share``.
        """
        if self.limits is None:
            return 0
        page_size = self.limits.page_size
        if given != "auto":
            return -(-given // page_size) * page_size
        return tail_interval(self.limits.tail_pages * self.page_bytes, page_bytes // page_size, page_size)

    def bytes_per_page(self, page_bytes: int) -> float:
        """Returns the bytes of window pages under ``auto`` for each page of the other layers, of ``page_bytes``."""
        share = self.tail_share(page_bytes)
        return page_bytes * share / (1 - share)

    def pages_beside(self, given: int | Auto, num_bytes: int, page_bytes: int) -> int:
        """Returns how many pages of the other layers fit into memory beside the window pages.

        Args:
            given: ``--window-pages``.
            num_bytes: Of both pools.
            page_bytes: Of a page of the other layers.
        """
        if self.limits is None:
            return num_bytes // page_bytes
        pages = int(num_bytes // (page_bytes + self.bytes_per_page(page_bytes)))
        least = self.limits.least_pages if given == "auto" else given
        beside = max(0, num_bytes - least * self.page_bytes) // page_bytes
        return min(pages, beside) if given == "auto" else beside

    def size(self, given: int | Auto, pages: int, num_bytes: int, rows: int, room: int) -> tuple[int, str]:
        """Returns the pages of the pool, and the reason; empty if they were given.

        Args:
            given: ``--window-pages``.
            pages: Of the other layers.
            num_bytes: All of them.
            rows: Requests that run at once.
            room: Bytes beside weights and the other layers' pages.

        Raises:
            ConfigError: The given pages do not hold one row, a tail and a step.
            ResourceError: The given pages do not fit.
        """
        limits = self.limits
        if limits is None:
            return 0, "" if given == 0 else "all layers share their pages"
        if given == "auto":
            share = int(self.bytes_per_page(num_bytes // pages) * pages / self.page_bytes)
            return max(limits.least_pages, min(share, pages + limits.most_pages(rows))), f"beside {pages} KV pages"
        if given < limits.least_pages:
            raise ConfigError(
                f"--window-pages is {given} but a row, a tail and the tokens of a step take {limits.least_pages}. Raise it, lower "
                "--max-batched-tokens, or give 0.",
                param="window_pages",
            )
        if given * self.page_bytes > room:
            raise ResourceError(
                f"{given} window pages need {given * self.page_bytes / GIB:.2f} GiB but {max(0, room) / GIB:.2f} GiB are free "
                "beside weights and KV pages. Lower --window-pages or --kv-pages, or leave --window-pages out.",
                param="window_pages",
            )
        return given, ""


NO_WINDOW_POOL = WindowPool(limits=None, slot_elements=0, element_bytes=0)

"""The sizes of the pools of tails, layers with a window and snapshots, beside that of the other layers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hiserve.config.serving import Auto
from hiserve.core.machine import GIB
from hiserve.errors import ConfigError, ResourceError

# Tails of a prompt are this many times as far apart as the tokens whose history takes as many bytes as a tail.
EVERY = 8
# Of the memory of both pools: the share of window pages, within bounds, by the tokens of history for each tail.
TAIL_TOKENS, LEAST_SHARE, MOST_SHARE = 1500, 1 / 8, 2 / 3
# Slots of the smallest pool: the padding slot, the two of a row that passes a boundary, and that of a snapshot to load.
LEAST_SLOTS = 4
ROW_SHARE = 4  # what rows carry along takes at most one in so many bytes beside the weights, under ``auto``


class WindowLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that bound the window pages of rows and steps."""

    window: int  # of the widest layer with a window: a token at position p sees positions above p - window
    page_size: int  # tokens per page
    num_draft: int  # most drafts of a row in a step
    depth: int  # steps planned ahead
    max_batched_tokens: int  # of a step
    tail_every: int = 0  # tokens of a prompt between two tails, a whole number of pages; 0 is none between
    has_snapshots: bool = False  # tails have snapshots of states, which lag behind the drafts of a step

    @property
    def tail_pages(self) -> int:
        """Pages of a tail: those that hold the ``window - 1`` tokens before a boundary."""
        return -(-(self.window - 1) // self.page_size)

    @property
    def row_pages(self) -> int:
        """Most pages of a row that decodes: of its window, and of the tokens and drafts of the steps in flight.

        With snapshots, the window is that of its next one: where a page has fewer tokens than a step has drafts, the row may have
        settled, and published, some pages behind that.
        """
        ahead = (self.depth + 1) * (self.num_draft + 1) + self.num_draft
        behind = max(1, -(-self.num_draft // self.page_size)) if self.has_snapshots else 1
        return self.tail_pages + behind + -(-ahead // self.page_size)

    @property
    def step_pages(self) -> int:
        """Most pages of the prompt tokens in flight, of all rows together."""
        return -(-(self.depth + 1) * self.max_batched_tokens // self.page_size)

    def promised_pages(self, limit: int) -> int:
        """Returns the pages promised to a row of at most ``limit`` tokens; those of the prompt tokens in flight are beside.

        Prompt tokens in flight may start within a page: hence one more than ``row_pages``.
        """
        return min(self.row_pages + 1, -(-(limit + self.num_draft) // self.page_size))

    @property
    def least_pages(self) -> int:
        """Pages of the smallest pool: for one row and its step, a tail that is being copied, and the padding page."""
        return 1 + self.row_pages + 1 + self.step_pages + self.tail_pages

    def most_pages(self, num_rows: int) -> int:
        """Returns the pages that so many rows and their steps hold at most, and the padding page."""
        return 1 + num_rows * (self.row_pages + 1) + self.step_pages


def tail_interval(tail_bytes: int, history_bytes: int, page_size: int) -> int:
    """Returns the tokens between two tails of a prompt, whole pages of ``page_size``.

    Args:
        tail_bytes: Of a tail.
        history_bytes: Of a token in the layers without a window.
        page_size: Tokens per page.
    """
    return max(1, EVERY * tail_bytes // (history_bytes * page_size)) * page_size


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
    """The pool of layers with a window, and that of snapshots, which share the memory of tails."""

    limits: WindowLimits | None  # None without a pool of windows
    slot_bytes: int  # of a token in these layers
    share: float | Auto = "auto"  # ``--tail-share``
    snapshot_bytes: int = 0  # of a snapshot; 0 of a model without
    page_size: int = 0  # tokens of a page; needed with snapshots

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 0 without a pool."""
        return 0 if self.limits is None else self.limits.page_size * self.slot_bytes

    def image_bytes(self, page_bytes: int) -> int:
        """Returns the bytes of a page on the host, where it takes whole pages of the other layers; 0 without a pool."""
        return -(-self.page_bytes // page_bytes) * page_bytes

    @property
    def has_tails(self) -> bool:
        """Whether boundaries need tails: window pages, snapshots, or both."""
        return self.limits is not None or self.snapshot_bytes > 0

    @property
    def _window_bytes(self) -> int:
        """Bytes of the window pages of a tail."""
        return 0 if self.limits is None else self.limits.tail_pages * self.page_bytes

    @property
    def _window_part(self) -> float:
        """Their part of the bytes of a tail."""
        return self._window_bytes / (self._window_bytes + self.snapshot_bytes) if self.snapshot_bytes else 1.0

    def tail_share(self, page_bytes: int) -> float:
        """Returns the share of tails in the memory of all pools; 0 without them.

        Under ``auto`` it is t / (t + 1500 h): t bytes of a tail, h of the history of a token. This was the best share in
        simulated traffic of chats and agents.

        Args:
            page_bytes: Of a page of the other layers.
        """
        if not self.has_tails:
            return 0.0
        if self.share != "auto":
            return self.share
        tail = self._window_bytes + self.snapshot_bytes
        history = page_bytes / self._page_size
        return min(MOST_SHARE, max(LEAST_SHARE, tail / (tail + TAIL_TOKENS * history)))

    @property
    def _page_size(self) -> int:
        return self.page_size if self.limits is None else self.limits.page_size

    def tail_every(self, given: int | Auto, page_bytes: int) -> int:
        """Returns the tokens between two tails of a prompt, whole pages; 0 is none between, or no tails.

        Args:
            given: ``--tail-every``.
            page_bytes: As in ``tail_share``.
        """
        if not self.has_tails:
            return 0
        page_size = self._page_size
        if given != "auto":
            return -(-given // page_size) * page_size
        return tail_interval(self._window_bytes + self.snapshot_bytes, max(1, page_bytes // page_size), page_size)

    def bytes_per_page(self, page_bytes: int) -> float:
        """Returns the bytes of tails under ``auto`` for each page of the other layers, of ``page_bytes``."""
        share = self.tail_share(page_bytes)
        return page_bytes * share / (1 - share)

    def pages_beside(self, given: int | Auto, num_bytes: int, page_bytes: int) -> int:
        """Returns how many pages of the other layers fit into memory beside the tails.

        Args:
            given: ``--window-pages``.
            num_bytes: Of all pools.
            page_bytes: Of a page of the other layers.
        """
        fixed, least, part = 0, LEAST_SLOTS * self.snapshot_bytes, 1 - self._window_part
        if self.limits is not None and given != "auto":
            fixed = given * self.page_bytes
        elif self.limits is not None:
            least, part = least + self.limits.least_pages * self.page_bytes, 1.0
        pages = int(max(0, num_bytes - fixed) // (page_bytes + self.bytes_per_page(page_bytes) * part))
        return min(pages, max(0, num_bytes - fixed - least) // page_bytes)

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
            share = int(self.bytes_per_page(num_bytes // pages) * self._window_part * pages / self.page_bytes)
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

    def size_slots(self, pages: int, num_bytes: int, room: int) -> int:
        """Returns the slots of snapshots, the padding slot included; 0 of a model without.

        Args:
            pages: Of the other layers.
            num_bytes: All of them.
            room: Bytes beside everything else.
        """
        if not self.snapshot_bytes:
            return 0
        share = int(self.bytes_per_page(num_bytes // pages) * (1 - self._window_part) * pages / self.snapshot_bytes)
        most = min(1 + pages, max(0, room) // self.snapshot_bytes)
        return max(LEAST_SLOTS, min(share, most))


def rows_within(given: int | Auto, rows: int, row_bytes: int, room: int) -> int:
    """Returns the requests that run at once: under ``auto`` so few that what they carry along leaves memory to the cache.

    Args:
        given: ``--max-running-requests``.
        rows: As it would be without.
        row_bytes: Of a request; a row more is for padding.
        room: Bytes beside the weights.
    """
    while given == "auto" and rows > 1 and (rows + 1) * row_bytes > room // ROW_SHARE:
        rows //= 2
    return rows


NO_WINDOW_POOL = WindowPool(limits=None, slot_bytes=0)

"""The window pages that a row holds, a step takes and a tail keeps: bounds, in whole pages."""

from __future__ import annotations

import msgspec

# Tails of a prompt are this many times as far apart as the tokens whose history takes as many bytes as a tail.
EVERY = 8


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

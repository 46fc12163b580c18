"""How large a step may be: smaller for a while after one has failed."""

from __future__ import annotations

SHRINK = 4  # a step has at most one so many-th of the tokens of the one that failed
GROW_AFTER, MAX_GROW_AFTER = 32, 1024  # steps that must pass before steps grow again, by as much


class StepBackoff:
    """The ladder between the largest step and one token.

    A step that failed is followed by smaller ones without drafts, down to one token, which is tried once more without a
    graph: a graph has its memory, so it is the last thing to do without. Every so many steps that pass lead back a
    rung; where that fails, twice as many the next time.

    Args:
        max_tokens: Of a step, when nothing is wrong.

    Attributes:
        num_tokens: Of a step, now.
        may_replay: Whether it may be replayed as a graph.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.num_tokens = max_tokens
        self.may_replay = True
        self._grow_after = GROW_AFTER
        self._num_passed = 0
        self._has_grown = False

    @property
    def is_reduced(self) -> bool:
        """Whether steps are smaller than they could be; they have no drafts then."""
        return self.num_tokens < self._max_tokens or not self.may_replay

    def shrink(self, num_tokens: int, *, was_replay: bool) -> bool:
        """A step of so many tokens failed; returns whether there is anything smaller."""
        self._num_passed = 0
        if self._has_grown:
            self._grow_after = min(2 * self._grow_after, MAX_GROW_AFTER)
            self._has_grown = False
        self.num_tokens = min(self.num_tokens, max(1, num_tokens // SHRINK))
        if num_tokens == 1 and was_replay:
            self.may_replay = False
            return True
        return num_tokens > 1

    def passed(self) -> None:
        """A step did not fail."""
        self._num_passed += 1
        if self._num_passed < self._grow_after:
            return
        self._num_passed = 0
        self._has_grown = self.is_reduced
        if self.is_reduced:
            self.may_replay = True
            self.num_tokens = min(self._max_tokens, self.num_tokens * SHRINK)
        else:
            self._grow_after = GROW_AFTER

"""How fast the queue empties, and so when it is worth coming back."""

from __future__ import annotations

import math

MIN_RETRY_S = 1
MAX_RETRY_S = 60
MEMORY_S = 10.0


class DrainRate:
    """What left a queue while others waited in it, per second of waiting; what is long ago counts less.

    A queue that is empty says nothing: what passes through it then takes no time.
    """

    def __init__(self) -> None:
        self._num_requests = 0.0
        self._num_tokens = 0.0
        self._busy_s = 0.0
        self._since_s: float | None = None

    def observe(self, now_s: float, num_requests: int, num_tokens: int, *, is_busy: bool) -> None:
        """Takes in what left since the last call.

        Args:
            now_s: The monotonic clock.
            num_requests: Requests that workers got.
            num_tokens: Tokens of their prompts.
            is_busy: Others still wait.
        """
        if self._since_s is not None:
            passed_s = now_s - self._since_s
            kept = math.exp(-passed_s / MEMORY_S)
            self._num_requests = self._num_requests * kept + num_requests
            self._num_tokens = self._num_tokens * kept + num_tokens
            self._busy_s = self._busy_s * kept + passed_s
        self._since_s = now_s if is_busy else None

    def retry_after_s(self, num_requests: int, num_tokens: int) -> int:
        """Returns the seconds until a queue like this has been emptied, ``MIN_RETRY_S`` to ``MAX_RETRY_S``.

        Args:
            num_requests: Requests in the queue.
            num_tokens: Tokens of their prompts.
        """
        seconds = num_requests * self._busy_s / max(1.0, self._num_requests)
        if self._num_tokens:
            seconds = max(seconds, num_tokens * self._busy_s / self._num_tokens)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds)))

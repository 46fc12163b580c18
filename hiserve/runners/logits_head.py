"""What follows the last attention of a step that is not one graph as a whole."""

from __future__ import annotations

from bisect import bisect_left

import torch.nn.functional as F
from torch import Tensor

from hiserve.models.decoder import Decoder


class LogitsHead:
    """Computes logits of as many tokens as some graph of a whole step does.

    Libraries choose kernels of products by their size, and load each at its first use: on an H200 27 ms for the tail of
    one step. The sizes of graphs are loaded when they are captured.

    Args:
        model: The decoder.
        sizes: Logits of graphs, ascending. Steps with more than the last have as many as they have.
    """

    def __init__(self, model: Decoder, sizes: tuple[int, ...] = ()) -> None:
        self._model = model
        self._sizes = sizes

    def logits(self, mixed: Tensor, residual: Tensor, logits_rows: Tensor, hidden_states: Tensor | None) -> Tensor:
        """As ``Decoder.logits``; the first token is computed again for each that a size has more."""
        count = logits_rows.shape[0]
        index = bisect_left(self._sizes, count)
        more = self._sizes[index] - count if count and index < len(self._sizes) else 0
        if more:
            logits_rows = F.pad(logits_rows, (0, more))
        return self._model.logits(mixed, residual, logits_rows, hidden_states)[:count]

"""Token embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Looks up one vector per token in ``weight``, ``[vocab_size, hidden_size]``."""

    weight: Tensor

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Returns ``[T, hidden_size]`` for int32 ``[T]``."""
        return F.embedding(input_ids, self.weight)

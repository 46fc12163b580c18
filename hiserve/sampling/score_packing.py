"""Log-probabilities of tokens under the model's own distribution, packed for one copy to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.kernels.sampling import likeliest

MAX_SLICE = 128  # bounds the copy of logits in float32: 65 MB for a vocabulary of 128,000


def pack_scores(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Returns the scores of N tokens as ``core.plan.Scores.unpack`` reads them, int32 ``[N, 1 + 2 * num_top]``.

    Args:
        logits: ``[N, vocab_size]``, any floating type, before every bias, penalty, temperature and filter.
        tokens: int64 ``[N]``. The token to score of each row.
        num_top: Likeliest tokens to add, at most ``vocab_size``; of equal float32 log-probabilities the lower token
            comes first.
    """
    parts = zip(torch.split(logits, MAX_SLICE), torch.split(tokens, MAX_SLICE), strict=True)
    return torch.cat([_pack(part, chosen[:, None], num_top) for part, chosen in parts])


def _pack(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = wide.log_softmax(-1).to(torch.float32)
    words = [logprobs.gather(1, tokens).view(torch.int32)]
    if num_top:
        top = likeliest(logprobs, num_top)
        words += [top.to(torch.int32), logprobs.gather(1, top).view(torch.int32)]
    return torch.cat(words, 1)

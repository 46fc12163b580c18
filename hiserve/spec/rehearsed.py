"""The rehearsed proposer, for measurements: it pays for a head's drafts, and writes those of a recorded reply instead.

A head has an honest acceptance only on text for which it was trained: none on random weights, and no choice of it on others.
Here each draft is right with a given probability, decided by the request's seed and the position, so that runs can be
repeated. All work of the head is done before its draft is replaced: what a step costs is what it costs with that head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hiserve.config.settings import TreeShape
from hiserve.core.drafts import DraftChain, Proposer
from hiserve.kernels.step_ops import RowTensors
from hiserve.sampling.params import SamplingRows

_MASK = 2**32 - 1
_FACTORS = 0x9E3779B1, 0x45D9F3B, 0x119DE1F3  # odd; a product of 32 bits and one of the last two fits 63 bits


class RehearsedReplies:
    """The recorded tokens of requests, by seed, and the drafts made of them; all at addresses that graphs may keep.

    Args:
        num_requests: N; requests have seeds below it.
        max_len: L, tokens of prompt and reply.
        vocab_size: Wrong drafts are other tokens below it.
    """

    def __init__(self, num_requests: int, max_len: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._tokens = np.zeros((num_requests, max_len), dtype=np.int32)
        # int32 ``[N, L]``: the draft of each position.
        self.drafts = torch.zeros((num_requests, max_len), dtype=torch.int32, device=device)

    def record(self, texts: Mapping[int, Sequence[int]], acceptance: float) -> None:
        """Sets the drafts for requests; no step may run meanwhile.

        Args:
            texts: Prompt and reply of each request, by seed.
            acceptance: The probability that a draft is right, from 0 to 1.
        """
        for seed, tokens in texts.items():
            self._tokens[seed] = 0
            self._tokens[seed, : len(tokens)] = tokens
        seeds, positions = np.indices(self._tokens.shape)
        wrong = (self._tokens + 1) % self._vocab_size
        drafts = np.where(chances(seeds, positions) < acceptance, self._tokens, wrong)
        self.drafts.copy_(torch.from_numpy(drafts))


def chances(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns for seeds and positions, both int64 ``[...]``, a number in [0, 1), as if drawn evenly: float64 ``[...]``."""
    first, *others = _FACTORS
    mixed = (seeds * first + positions + 1) & _MASK
    for factor in others:
        mixed = ((mixed ^ (mixed >> 16)) * factor) & _MASK
    return np.asarray((mixed ^ (mixed >> 15)) / 2**32)


class RehearsedProposer:
    """Drafts what was recorded, at the cost of another proposer."""

    def __init__(
        self, proposer: Proposer, replies: RehearsedReplies, state: RowTensors, sampling: SamplingRows
    ) -> None:
        self.aux_layers = proposer.aux_layers
        self.tree_of, self.is_capturable = proposer.tree_of, proposer.is_capturable
        self.prepare, self.extend, self.update_only = proposer.prepare, proposer.extend, proposer.update_only
        self._proposer = proposer
        self._replies = replies
        self._state = state
        self._sampling = sampling

    def draft(self, chain: DraftChain, tree: TreeShape | None, *, is_greedy: bool) -> None:
        """Lets the other one draw and write its draft, then writes over it."""
        self._proposer.draft(chain, tree, is_greedy=is_greedy)
        tokens, drafts, positions = self._state.tokens, self._replies.drafts, chain.positions - 1
        _, seeds, _ = self._sampling.free_draws(chain.rows)
        num_requests, max_len = drafts.shape
        flat = seeds.clamp(0, num_requests - 1) * max_len + positions.clamp(max=max_len - 1)
        recorded = drafts.view(-1).index_select(0, flat)
        has_slot = chain.legal & (positions < tokens.shape[1])
        flat = torch.where(has_slot, chain.rows * tokens.shape[1] + positions, 0)
        tokens.view(-1).scatter_(0, flat, torch.where(has_slot, recorded, 0))

"""The proposer without a model: drafts are the tokens that followed an earlier occurrence of the row's last tokens.

The idea is prompt lookup decoding (Saxena 2023): replies repeat what their prompts say. What earlier replies say comes with the
plan, from ``spec.history``.
"""

from __future__ import annotations

import torch

from hiserve.config.settings import TreeShape
from hiserve.core.drafts import DraftChain, DraftStep
from hiserve.kernels.draft_ops import DraftOps
from hiserve.kernels.step_ops import RowTensors

_MIN_NGRAM, _MAX_NGRAM = 1, 3


class NgramProposer:
    """Looks up each row's last tokens among its earlier ones, on the device, and follows the continuations of the plan.

    Args:
        min_ngram: Fewest last tokens that must agree, at least 1.
        max_ngram: Most last tokens that are compared.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(
        self, state: RowTensors, ops: DraftOps, min_ngram: int = _MIN_NGRAM, max_ngram: int = _MAX_NGRAM
    ) -> None:
        assert 1 <= min_ngram <= max_ngram, f"from {min_ngram} to {max_ngram} tokens"
        self._state = state
        self._ops = ops
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._no_continuations = torch.zeros(
            (state.known_len.shape[0], 2), dtype=torch.int32, device=state.tokens.device
        )

    def tree_of(self, num_draft: int) -> None:
        """Returns None: drafts are chains."""

    def is_capturable(self, num_rows: int, width: int) -> bool:
        """Returns False: one launch needs no graph."""
        return False

    def prepare(self, step: DraftStep) -> None:
        """Writes all drafts after the known tokens of each sampling row, in one launch."""
        if not step.sampling.shape[0]:
            return
        num_rows = step.sampling.shape[0]
        self._ops.draft_ngrams(
            step.rows.index_select(0, step.sampling),
            self._state,
            self._no_continuations[:num_rows] if step.continuations is None else step.continuations,
            num_draft=step.num_draft,
            min_ngram=self._min_ngram,
            max_ngram=self._max_ngram,
            max_known=int(step.kv_bounds.max()) + 1,  # the token drawn last is not stored
        )

    def draft(self, chain: DraftChain, tree: TreeShape | None, *, is_greedy: bool) -> None:
        """Never called: ``prepare`` leaves no chain."""

    def extend(self, chain: DraftChain) -> None:
        """Likewise."""

    def update_only(self, step: DraftStep) -> None:
        """Does nothing: the rows' tokens are all that drafts depend on."""

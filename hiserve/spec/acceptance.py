"""The probability that drafts are accepted, in chains and in trees, estimated from the steps that verified some."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import Int32Array
from hiserve.core.startup_measurements import FloatArray, StepCosts

PRIOR = 0.6  # of the first draft, before any was verified
PRIOR_ROWS = 2.0  # rows that weigh as much
WINDOW_ROWS = 64.0  # whose drafts are remembered,
WINDOW_STEPS = 8.0  # and for how many steps at least
LEAST_CHANCE = 1e-3  # whose changes are reported
# Independent drafts of a chain that have the chance of the candidates of a tree's level, before trees were verified.
TREE_CANDIDATES = 1.2


class Acceptance:
    """The probability that drafts are accepted, by their place in the chain, or their level in a tree; recent steps weigh most.

    A place that no row has reached lately keeps its chance relative to the one before it; one never reached has the
    same chance as that, or that of the place in ``base``.

    Args:
        max_draft: K, at least 1.
        base: Drafts of another kind, which these are like until they are verified.
        candidates: Independent drafts of ``base`` that one of these is like then.
    """

    def __init__(self, max_draft: int, base: Acceptance | None = None, candidates: float = 1.0) -> None:
        self._max_draft = max_draft
        self._base, self._candidates = base, candidates
        self._prior = PRIOR
        # Of the rows that verified a draft at a place: those whose drafts before it were accepted, and it as well.
        self._reached = np.zeros(max_draft)
        self._accepted = np.zeros(max_draft)
        self.after = np.zeros(max_draft)  # float64 ``[K]``: that a row's draft is accepted where those before it are
        self.update()

    @property
    def chances(self) -> FloatArray:
        """That a row's drafts up to each place are accepted, float64 ``[K]``."""
        return self.after.cumprod()

    def add(self, num_draft: Int32Array, counts: Int32Array) -> None:
        """Records a step; int32 ``[S]`` drafts of each row, and those accepted + 1."""
        num_rows = _num_with(num_draft, self._max_draft)
        share = num_rows / (WINDOW_ROWS + WINDOW_STEPS * num_rows)
        self._reached += _num_with(np.minimum(num_draft, counts), self._max_draft) - share * self._reached
        self._accepted += _num_with(counts - 1, self._max_draft) - share * self._accepted
        self.update()

    def forget(self) -> None:
        """Drops all observations, and expects no draft to be accepted."""
        self._prior = 0.0
        self._reached[:] = self._accepted[:] = 0.0
        self.update()

    def follow(self, change: FloatArray) -> None:
        """Lets the chances grow by such factors as those of other drafts, float64 ``[n]``; more places have the last one's."""
        self._accepted = np.minimum(self._accepted * _resized(change, self._max_draft), self._reached)
        self.update()

    def update(self) -> None:
        """Computes ``after``, also of a ``base`` that has changed."""
        before, of_base = self._prior, None if self._base is None else self._base.after
        for place, (reached, accepted) in enumerate(zip(self._reached.tolist(), self._accepted.tolist(), strict=True)):
            if of_base is not None:
                before = 1.0 - (1.0 - float(of_base[min(place, of_base.size - 1)])) ** self._candidates
            before = (accepted + PRIOR_ROWS * before) / (reached + PRIOR_ROWS)
            self.after[place] = before


class TierAcceptance:
    """Expects the accepted drafts of every tier: of chains, and of each tree.

    What is verified step after step tells of the other kinds, which single probes verify: their chances change by the same
    factors. A level of a tree also has the candidates of a smaller tree, or the draft of a chain, among its own: smaller kinds
    are expected to be accepted no more, and larger ones no less. What fails is therefore not tried in every other form.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._tiers, self._num_chains = np.array(costs.tiers, np.int64), costs.num_chains
        self._kinds = [Acceptance(costs.max_chain)]  # of chains, then of each tree
        for index, depth in enumerate(costs.tree_depths):
            self._kinds.append(Acceptance(depth, self._kinds[-1], 1.0 if index else TREE_CANDIDATES))
        self._verified = self._last = (
            0  # the kind of the last two equal steps, which no probe was; that of the last step
        )

    def add(self, tier: int, num_draft: Int32Array, counts: Int32Array) -> None:
        """Records a step that verified one of the C tiers; int32 ``[S]`` drafts of each row, and those accepted + 1.

        Of rows with fewer drafts than the tree that others have nothing is recorded: they verify a part of it, or a chain.
        """
        kind = max(0, tier - self._num_chains + 1)
        if tier:
            self._verified, self._last = (kind if kind == self._last else self._verified), kind
        if kind:
            counts = counts[num_draft == self._tiers[tier]]
            num_draft = np.full_like(counts, self._kinds[kind].after.size)
        if counts.size:
            known = self._kinds[kind]
            before = known.after.copy()
            known.add(num_draft, counts)
            if kind == self._verified:
                for other in self._kinds:
                    if other is not known:
                        other.follow(known.after / np.maximum(before, LEAST_CHANCE))

    def forget(self) -> None:
        """Drops all observations, and expects no draft to be accepted."""
        for each in self._kinds:
            each.forget()

    def tokens(self, allowed: Int32Array) -> FloatArray:
        """Returns the expected tokens of rows with each of the C tiers, where each has ``allowed`` drafts at most: float64 ``[C]``.

        A row that is not allowed all nodes of a tree is taken to have a chain.
        """
        num_chains, chains = self._num_chains, self._after(0).cumprod()
        up_to = np.append(0.0, (_num_with(allowed, chains.size) * chains).cumsum())
        tokens = np.full(self._tiers.size, float(allowed.size))
        tokens[:num_chains] += up_to[self._tiers[:num_chains]]
        for kind, tier in enumerate(range(num_chains, tokens.size), 1):
            is_short = allowed < self._tiers[tier]
            tokens[tier] += (allowed.size - int(is_short.sum())) * self._after(kind).cumprod().sum()
            tokens[tier] += float(_num_with(allowed[is_short], chains.size) @ chains)
        return tokens

    def _after(self, kind: int) -> FloatArray:
        """Returns ``Acceptance.after`` of a kind, within what was seen of the one verified last."""
        after, verified = self._kinds[kind].after, self._kinds[self._verified].after
        if kind == self._verified:
            return after
        within: FloatArray = (np.minimum if kind < self._verified else np.maximum)(
            after, _resized(verified, after.size)
        )
        return within


def _resized(values: FloatArray, size: int) -> FloatArray:
    """Returns so many of the values, the last one repeated where there are fewer."""
    return values[np.minimum(np.arange(size), values.size - 1)]


def _num_with(num_draft: Int32Array, max_draft: int) -> NDArray[np.int64]:
    """Returns how many rows have a draft at each place, int64 ``[max_draft]``."""
    rows = np.bincount(np.minimum(num_draft, max_draft), minlength=max_draft + 1)
    return rows[:0:-1].cumsum()[::-1]

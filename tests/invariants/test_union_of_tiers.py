"""Device and host together find nearly what one LRU cache as large as both would find.

The trace and that cache (``benchmarks/tier_traces.py``) know nothing of the index. Copies end one step after they began.
"""

from __future__ import annotations

import pytest

from benchmarks.tiers import BAR, RATIOS, Scale, simulate
from tests.helpers.widening import some

SEED = 2
CASES = [(order, ratio, Scale()) for order in ("in turn", "zipf") for ratio in RATIOS]
LARGE_STEPS = [("in turn", 0.5, Scale(step=64))]


@pytest.mark.parametrize(("order", "ratio", "scale"), some([*CASES, *LARGE_STEPS], CASES[0], CASES[9], *LARGE_STEPS))
def test_the_tiers_add_up(order: str, ratio: float, scale: Scale) -> None:
    """64 conversations; without write-backs, a host no larger than the device finds nothing.

    The usual cases are the smallest host and the largest, in either order, and one between them with large steps.
    """
    print(f"seed {SEED}")
    found = simulate(scale, ratio, scale.requests(order, SEED))
    print(f"{found.tokens} tokens found, {found.tokens / found.wanted:.3f} of {found.wanted}; missing {found.missing}")
    assert found.tokens >= BAR * found.wanted
    assert found.num_evicted > scale.device
    assert found.num_stored <= found.num_evicted + (1 + ratio) * scale.device, "pages are copied in vain"
    assert found.num_loaded > 0

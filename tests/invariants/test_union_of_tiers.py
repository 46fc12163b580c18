"""Device and host together find nearly what one LRU cache as large as both would find.

The trace and that cache (``benchmarks/tier_traces.py``) know nothing of the index. Copies end one step after they began.
"""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.tier_traces import ORDERS, UnionLru, conversations
from tests.helpers.copying import add, copying_engine, run

PAGE, MAX_PAGES, BUDGET = 4, 80, 64
NUM_DEVICE_PAGES = 1600
NUM_TURNS, NUM_WARM_UP = 500, 150
SEED = 2
BAR = 0.95


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("order", ORDERS)
def test_the_tiers_add_up(order: str, ratio: float) -> None:
    """64 conversations; without write-backs, a host no larger than the device finds nothing."""
    print(f"seed {SEED}")
    num_host_pages = int(NUM_DEVICE_PAGES * ratio)
    engine, _, cache = copying_engine(
        num_pages=NUM_DEVICE_PAGES + 1,
        num_host_pages=num_host_pages + 1,
        page_size=PAGE,
        max_len=MAX_PAGES * PAGE + 8,
        budget=BUDGET,
    )
    union = UnionLru(NUM_DEVICE_PAGES + num_host_pages, PAGE)
    found = wanted = 0
    for uid, turn in enumerate(islice(conversations(order, SEED, PAGE, MAX_PAGES), NUM_TURNS)):
        could = union.serve(turn)
        add(engine, uid, turn.prompt, turn.num_new)
        use = run(engine)[uid]
        if uid >= NUM_WARM_UP:
            found, wanted = found + use.device + use.host, wanted + could
    print(f"{found} tokens found, {found / wanted:.3f} of {wanted}")
    assert found >= BAR * wanted
    assert cache.num_evicted > NUM_DEVICE_PAGES
    stores, loads = engine.stats().cache.stores, engine.stats().cache.loads
    assert stores.num_fulfilled <= cache.num_evicted + num_host_pages + NUM_DEVICE_PAGES, "pages are copied in vain"
    assert loads.num_fulfilled > 0

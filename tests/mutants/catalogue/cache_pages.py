"""Guards of the page allocator and of the eviction queue."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PAGES = "hiserve/cache/index/pages.py"
EVICTION = "hiserve/cache/index/eviction.py"
OF_MANAGER = "tests/unit/cache/test_manager.py::"
OF_PAGES = "tests/unit/cache/test_pages.py::"
OF_EVICTION = "tests/unit/cache/test_eviction.py::"

MUTANTS = [
    Mutant(
        name="the sink is handed out",
        file=PAGES,
        old="        self._is_free[SINK_PAGE] = False\n",
        new="",
        test=OF_PAGES + "test_a_wish_for_the_sink_or_a_used_page_or_one_outside_the_pool_is_no_wish",
    ),
    Mutant(
        name="two rows get the page both wished for",
        file=PAGES,
        old="            granted &= first\n",
        new="",
        test=OF_PAGES + "test_of_two_wishes_for_a_page_the_first_is_granted",
    ),
    Mutant(
        name="no wish is granted",
        file=PAGES,
        old="granted = self._is_free[pages]",
        new="granted = np.zeros(pages.size, dtype=np.bool_)",
        test=OF_PAGES + "test_a_free_page_that_is_wished_for_is_granted_and_not_handed_out_again",
    ),
    Mutant(
        name="a page taken by wish is handed out again from the stack",
        file=PAGES,
        old="batch = batch[self._is_free[batch]]",
        new="batch = batch[: batch.size]",
        test=OF_PAGES + "test_a_free_page_that_is_wished_for_is_granted_and_not_handed_out_again",
    ),
    Mutant(
        name="a page lies on the stack twice",
        file=PAGES,
        old="fresh = pages[~self._stacked[pages]][::-1]",
        new="fresh = pages[::-1]",
        test=OF_PAGES + "test_a_page_taken_by_wish_and_given_back_is_handed_out_once",
    ),
    Mutant(
        name="a free page or the sink may be given back",
        file=PAGES,
        old='assert not self._is_free[pages].any() and SINK_PAGE not in pages, f"pages {pages} are not all in use"',
        new="",
        test=OF_PAGES + "test_giving_a_free_page_or_the_sink_is_our_own_fault",
    ),
    Mutant(
        name="a page may be given back twice at once",
        file=PAGES,
        old='assert np.unique(pages).size == pages.size, f"a page is given back twice in {pages}"',
        new="",
        test=OF_PAGES + "test_giving_a_page_twice_at_once_is_our_own_fault",
    ),
    Mutant(
        name="two allocations get the same number",
        file=PAGES,
        old="        self._num_taken += pages.size\n",
        new="",
        test=OF_PAGES + "test_each_allocation_of_a_page_has_a_number_of_its_own",
    ),
    Mutant(
        name="the most recently used goes first",
        file=EVICTION,
        old='attrgetter("turn", "last_used")',
        new="lambda node: (node.turn, -node.last_used)",
        test=OF_EVICTION + "test_the_least_recently_used_goes_first",
    ),
    Mutant(
        name="locked leaves are evicted",
        file=EVICTION,
        old="return bool(self._rank(node) == rank) and self._is_victim(node)",
        new="return bool(self._rank(node) == rank)",
        test=OF_EVICTION + "test_what_is_locked_has_children_or_is_gone_is_passed_over",
    ),
    Mutant(
        name="entries out of date count",
        file=EVICTION,
        old="return bool(self._rank(node) == rank) and self._is_victim(node)",
        new="return self._is_victim(node)",
        test=OF_EVICTION + "test_use_moves_a_node_to_the_back",
    ),
    Mutant(
        name="the eviction heap is never swept",
        file=EVICTION,
        old="if len(self._heap) >= self._sweep_at:",
        new="if False:",
        test=OF_MANAGER + "test_endless_use_of_one_prefix_keeps_the_eviction_queue_small",
    ),
    Mutant(
        name="a sweep loses leaves",
        file=EVICTION,
        old="self._heap = sorted(latest.values(), key=lambda entry: entry[:2])",
        new="self._heap = sorted(latest.values(), key=lambda entry: entry[:2])[1:]",
        test=OF_EVICTION + "test_a_sweep_keeps_what_nobody_used_since",
    ),
    Mutant(
        name="a leaf that changed hands still goes for its former owner",
        file=EVICTION,
        old="return node.owner == owner and self._is_victim(node)",
        new="return self._is_victim(node)",
        test="tests/unit/cache/test_shares.py::test_what_was_adopted_counts_for_its_tenant_from_its_first_request_on",
    ),
    Mutant(
        name="a long leaf is evicted beyond its owner's share",
        file="hiserve/cache/index/shares.py",
        old="yield found, excess",
        new="yield found, found.num_pages",
        test="tests/unit/cache/test_shares.py",
    ),
]

"""Guards against reported bugs of hierarchical caches in an engine and in pools, by number; and of eviction by priority."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLANNER = "hiserve/worker/planner.py"
TABLES = "hiserve/worker/tables.py"
LOOP = "hiserve/worker/loop.py"
TIERS = "hiserve/cache/index/tiers.py"
HOLDS = "hiserve/cache/index/holds.py"
RADIX = "hiserve/cache/index/radix.py"
MANAGER = "hiserve/cache/index/manager.py"
EXCHANGE = "hiserve/cache/index/exchange.py"
EVICTION = "hiserve/cache/index/eviction.py"
TRANSFERS = "hiserve/cache/index/transfers.py"
QUEUE = "hiserve/cache/pools/transfer_queue.py"
IDENTITY = "hiserve/models/identity.py"
STREAMS = "tests/invariants/test_reported_bugs_streams.py::"
LIFE = "tests/invariants/test_reported_bugs_life.py::"
NAMESPACES = "tests/invariants/test_reported_bugs_namespaces.py::"
COSTS = "tests/invariants/test_reported_bugs_costs.py::"
MACHINE = "tests/invariants/test_tier_machine.py::test_two_tiers_agree_with_the_model_and_order_every_access"
TRACE = "tests/invariants/test_trace_of_tiers.py"
OF_EVICTION = "tests/unit/cache/test_eviction.py::"
E2E = "tests/e2e/test_priority_eviction.py"

MUTANTS = [
    Mutant(
        name="TC-20: pages are published while the forward that writes them is in flight",
        file=TABLES,
        old="full = np.minimum(columns.settled[rows], columns.known[rows])",
        new="full = np.minimum(columns.computed[rows], columns.known[rows])",
        test=STREAMS + "test_tc_20_a_store_begins_when_the_forward_that_wrote_its_pages_is_done",
    ),
    Mutant(
        name="TC-21: pages given back forget the forward in flight",
        file=TIERS,
        old="        self.device.give(pages, self.step)\n",
        new="        self.device.give(pages, 0)\n",
        test=STREAMS + "test_tc_21_a_load_waits_for_the_forwards_that_may_touch_its_pages",
    ),
    Mutant(
        name="TC-21: copies wait for no step",
        file=QUEUE,
        old="return bool(queue) and queue[0].after_step <= self._done_step",
        new="return bool(queue)",
        test=STREAMS + "test_tc_21_a_load_waits_for_the_forwards_that_may_touch_its_pages",
    ),
    Mutant(
        name="TC-40: acks are taken only when there is nothing to run",
        file=LOOP,
        old="settle(self._executor.take_acks(), self._executor",
        new="settle([], self._executor",
        test=LIFE + "test_tc_40_a_loop_that_only_decodes_takes_acks_and_returns_what_copies_held",
    ),
    Mutant(
        name="TC-41: an engine with copies in flight looks idle",
        file=PLANNER,
        old="has_copies = self._loading.has_copies or",
        new="has_copies =",
        test=LIFE + "test_tc_41_an_engine_without_requests_has_work_until_its_copies_are_answered",
    ),
    Mutant(
        name="TC-42: an aborted request keeps its lock",
        file=PLANNER,
        old="        self._cache.release(receipt)\n",
        new="",
        test=LIFE + "test_tc_42_a_request_aborted_at_any_step_leaves_nothing_held",
    ),
    Mutant(
        name="TC-43: prefetches that have ended are remembered",
        file=EXCHANGE,
        old="op, run = self._ops.end(number), self._runs.pop(number)",
        new="op, run = self._ops.end(number), self._runs[number]",
        test=LIFE + "test_tc_43_prefetches_without_end_keep_no_memory",
    ),
    Mutant(
        name="TC-46: pages that a load fills are there for the next",
        file=HOLDS,
        old="        tiers.device.num_evictable -= num_pinned\n",
        new="",
        test=LIFE + "test_tc_46_requests_wait_for_pages_that_copies_hold_and_then_run",
    ),
    Mutant(
        name="TC-60: a page lies across two pinned pieces",
        file="hiserve/cache/pools/touch.py",
        old="max(1, piece_bytes // stride) * stride // layout.page_bytes",
        new="max(1, piece_bytes // layout.page_bytes)",
        test="tests/unit/pools/test_touch.py::test_every_page_lies_in_one_pinned_piece",
    ),
    Mutant(
        name="TC-61: pages of another size are taken for ours",
        file="hiserve/cache/pools/segment.py",
        old="if other.page_size != self.page_size:",
        new="if False:",
        test=NAMESPACES + "test_tc_61_a_segment_of_another_page_size_is_refused_by_name",
    ),
    Mutant(
        name="TC-64: the limit of a control group does not count",
        file="hiserve/core/machine.py",
        old="available = min(available, int(text) - used)",
        new="available = min(available, int(text) * 99 - used)",
        test=NAMESPACES + "test_tc_64_the_host_cache_fits_the_least_of_memory_control_group_and_dev_shm",
    ),
    Mutant(
        name="TC-71: weights are told apart by their size and header alone",
        file=IDENTITY,
        old="hasher.update(os.pread(file.fileno(), BLOCK_BYTES, start))",
        new="pass",
        test="tests/unit/models/test_identity.py::test_a_small_file_is_read_whole",
    ),
    Mutant(
        name="TC-72: element types share a cache",
        file=IDENTITY,
        old="*weights, dtype, layout",
        new="*weights, layout",
        test=NAMESPACES + "test_tc_72_another_dtype_layout_or_shard_shares_nothing_of_one_store",
    ),
    Mutant(
        name="TC-80: the planner touches each page of a load",
        file=TRANSFERS,
        old="        pages = pages.copy()\n",
        new="        pages = np.array([page.item() for page in pages], dtype=np.int32)\n",
        test=COSTS + "test_tc_80_a_host_hit_costs_the_loop_no_more_when_it_is_long",
    ),
    Mutant(
        name="TC-81: whoever orders a copy carries it out",
        file="hiserve/cache/pools/transfer.py",
        old="        self._queue.add(copy)\n",
        new="        self._hold and self._hold(copy)\n        self._queue.add(copy)\n",
        test=COSTS + "test_tc_81_a_load_is_one_order_carried_out_by_another_thread",
    ),
    Mutant(
        name="TC-83: every store looks at the whole tree",
        file=TRANSFERS,
        old="            node = self._queue.popleft()\n",
        new="            node = self._queue.popleft()\n            _ = list(self._tiers.tree.nodes())\n",
        test=COSTS + "test_tc_83_storing_a_node_costs_the_same_whatever_else_is_cached",
    ),
    Mutant(
        name="TC-84: every eviction looks at every leaf",
        file=EVICTION,
        old="        while self._heap:\n            entry",
        new="        self.sweep()\n        while self._heap:\n            entry",
        test=COSTS + "test_tc_84_eviction_looks_at_what_it_evicts_and_not_at_every_leaf",
    ),
    Mutant(
        name="eviction by priority looks at the last use alone",
        file=EVICTION,
        old='attrgetter("priority", "last_used")',
        new='attrgetter("last_used")',
        test=OF_EVICTION + "test_the_lowest_priority_goes_first_and_of_equals_the_least_recently_used",
    ),
    Mutant(
        name="INV-09: a lock raises the priority of its last node alone",
        file=HOLDS,
        old="        step.priority = priority\n        step = step.parent\n",
        new="        step.priority = priority\n        break\n",
        test=MACHINE,
    ),
    Mutant(
        name="what a request publishes onto keeps its priority",
        file=HOLDS,
        old="        child.priority = max(child.priority, hold.priority)\n",
        new="",
        test=MACHINE,
    ),
    Mutant(
        name="new pages take over the priority of the leaf they grow",
        file=MANAGER,
        old=" and node.priority == hold.priority",
        new="",
        test=MACHINE,
    ),
    Mutant(
        name="new pages have no priority",
        file=MANAGER,
        old="            end.priority = hold.priority\n",
        new="",
        test=MACHINE + " " + TRACE,
    ),
    Mutant(
        name="a split forgets the priority of its upper part",
        file=RADIX,
        old="        upper.priority = node.priority\n",
        new="",
        test=MACHINE,
    ),
    Mutant(
        name="a prefetch is more important than what it continues",
        file=EXCHANGE,
        old="        raise_priority(parent, child.priority)\n",
        new="",
        test=MACHINE,
    ),
    Mutant(
        name="a request's priority stays with the scheduler",
        file="hiserve/scheduler/ledger.py",
        old="            priority=self.priority,\n",
        new="",
        test=E2E,
    ),
    Mutant(
        name="a request's priority does not reach the cache",
        file="hiserve/worker/admitter.py",
        old="cache.lock(match, num_host, request.priority, request.account)",
        new="cache.lock(match, num_host, 0, request.account)",
        test=E2E,
    ),
    Mutant(
        name="--eviction changes nothing",
        file="hiserve/worker/build.py",
        old="eviction = EVICTIONS[config.cache.eviction]",
        new='eviction = EVICTIONS["lru"]',
        test=E2E,
    ),
]

"""Guards of what users see of the cache: usage, counts, metrics, tree, flushes by tier."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

S, W = "hiserve/server/", "hiserve/worker/"
ROUTES, METRICS, ALIASES = S + "cache_routes.py", S + "cache_metrics.py", S + "aliases.py"
STATS, TREE, SERVICE = W + "cache_stats.py", W + "cache_tree.py", W + "service.py"
ROUNDS = "hiserve/scheduler/rounds.py"
OF_USAGE = "tests/unit/server/test_cache_usage.py::"
OF_ROUTES = "tests/unit/server/test_cache_routes.py::"
OF_METRICS = "tests/unit/server/test_cache_metrics.py::"
OF_STATS = "tests/unit/worker/test_cache_stats.py::"
OF_TREE = "tests/unit/worker/test_cache_tree.py::"
OF_SERVICE = "tests/unit/worker/test_service.py::"
OF_ROUNDS = "tests/unit/scheduler/test_rounds.py::"
OVER_HTTP = "tests/e2e/test_cache_over_http.py::"

MUTANTS = [
    # --- usage ---
    Mutant(
        name="the miss shown is that of the last prompt",
        file="hiserve/core/reuse.py",
        old="self.miss, self.miss_at",
        new="other.miss, other.miss_at",
        test=OF_USAGE + "test_several_prompts_are_summed_and_the_miss_is_the_first_ones",
    ),
    Mutant(
        name="usage counts the tiers of the first prompt alone",
        file=S + "choices.py",
        old="return sum((other.cached for other in others), first.cached)",
        new="return first.cached",
        test=OF_USAGE + "test_several_prompts_are_summed_and_the_miss_is_the_first_ones",
    ),
    Mutant(
        name="a miss is shown where nobody looked",
        file=S + "shapes.py",
        old='return {"reason": cached.miss, "at": cached.miss_at} if cached.miss else None',
        new='return {"reason": cached.miss, "at": cached.miss_at}',
        test=OF_USAGE + "test_without_a_reason_there_is_no_miss",
    ),
    # --- counts ---
    Mutant(
        name="pages whose load failed are lost count of",
        file=STATS,
        old="ended.unfulfilled[ack.reason or PLACE_LOST] += num_lost",
        new="ended.unfulfilled[PLACE_LOST] += num_lost if ack.is_ok else 0",
        test=OF_STATS + "test_every_wanted_page_is_fulfilled_unfulfilled_or_in_flight",
    ),
    Mutant(
        name="what was begun counts as fulfilled when its bytes arrive, place or not",
        file=STATS,
        old="_end(self._loads, copy, ack, transfers.num_loaded - self._loads.num_pages)",
        new="_end(self._loads, copy, ack, copy.host_pages.size if ack.is_ok else 0)",
        test=OF_STATS + "test_a_load_whose_place_is_gone_when_it_arrives_is_no_fulfilled_hit",
    ),
    Mutant(
        name="pages that were left on the host are no hits",
        file=STATS,
        old="num_wanted=self._cache.ops.num_begun[kind] + num_refused,",
        new="num_wanted=self._cache.ops.num_begun[kind],",
        test=OF_STATS + "test_every_wanted_page_is_fulfilled_unfulfilled_or_in_flight",
    ),
    Mutant(
        name="a copy that has ended is in flight for ever",
        file="hiserve/cache/index/ops.py",
        old="self.num_in_flight[op.kind] -= op.host_pages.size",
        new="pass",
        test=OF_STATS + "test_every_wanted_page_is_fulfilled_unfulfilled_or_in_flight",
    ),
    Mutant(
        name="what a report told changes after it",
        file=STATS,
        old="misses=dict(self._misses),",
        new="misses=self._misses,",
        test=OF_STATS + "test_what_was_told_does_not_change_afterwards",
    ),
    Mutant(
        name="the admission does not say what a request found",
        file=W + "admitter.py",
        old="self._counts.admitted(request.cached)",
        new="pass",
        test=OVER_HTTP + "test_every_miss_has_its_reason",
        timeout_s=120,
    ),
    Mutant(
        name="a worker rests without telling how its last copies ended",
        file=SERVICE,
        old="if report is None and self._engine.has_work and not is_due:",
        new="if report is None:",
        test=OF_SERVICE + "test_stats_that_changed_without_news_of_a_request_are_told_once_the_worker_rests",
        timeout_s=30,
    ),
    Mutant(
        name="a resting worker repeats itself",
        file=SERVICE,
        old="if report is not None or stats != self._told or is_due:",
        new="if True:",
        test=OF_SERVICE + "test_stats_that_changed_without_news_of_a_request_are_told_once_the_worker_rests",
    ),
    # --- metrics ---
    Mutant(
        name="a restarted worker makes the cache's counters fall",
        file=METRICS,
        old="counter.inc(max(0, now - before) * scale)",
        new="counter.inc((now - before) * scale)",
        test=OF_METRICS + "test_counters_never_fall_and_workers_add_up",
    ),
    Mutant(
        name="pages that can be evicted count as held",
        file=METRICS,
        old='"held": num_pages - num_free - num_evictable',
        new='"held": num_pages - num_free',
        test=OF_METRICS + "test_pages_of_each_tier_are_free_evictable_or_held",
    ),
    Mutant(
        name="directions keep our names in vLLM's metrics",
        file=ALIASES,
        old="alias.values.get(text, text)",
        new="text",
        test=OF_METRICS + "test_other_engines_names_show_the_same_copies",
    ),
    # --- tree ---
    Mutant(
        name="a level shows all its nodes",
        file=TREE,
        old='level = nlargest(MAX_NODES, level, key=attrgetter("last_used"))',
        new='level = nlargest(len(level), level, key=attrgetter("last_used"))',
        test=OF_TREE
        + "test_a_level_shows_those_used_last "
        + OF_TREE
        + "test_nodes_below_what_is_not_shown_are_not_shown",
    ),
    # --- routes and rounds ---
    Mutant(
        name="anyone may look at the tree",
        file=ROUTES,
        old="self._auth.require_admin(request)\n        depth",
        new="depth",
        test="tests/unit/server/test_auth.py::test_what_affects_all_tenants_needs_the_admin_key",
    ),
    Mutant(
        name="a flush of a tier that is not there flushes nothing and says nothing",
        file=ROUTES,
        old="if not tiers:",
        new="if False:",
        test=OF_ROUTES + "test_a_flush_of_what_is_not_there_is_refused",
    ),
    Mutant(
        name="the depth of a tree has no limit",
        file=ROUTES,
        old="if not 1 <= depth <= MAX_DEPTH:",
        new="if not 1 <= depth:",
        test=OF_ROUTES + "test_a_depth_that_is_none_is_refused_with_the_limits",
    ),
    Mutant(
        name="a plain flush empties the device alone",
        file=ROUTES,
        old="if name is None:\n            return LOCAL_TIERS",
        new='if name is None:\n            return ("device",)',
        test=OF_ROUTES + "test_a_flush_empties_the_tier_it_names_and_says_how_many_pages",
    ),
    Mutant(
        name="a flush of a tier empties both",
        file=W + "planner.py",
        old="self._cache.flush(None if len(local) == len(Tier) else local[0])",
        new="self._cache.flush(None)",
        test=OVER_HTTP + "test_a_flush_of_a_tier_changes_what_the_next_request_finds_and_the_tree_shows",
        timeout_s=120,
    ),
    Mutant(
        name="a plain flush empties the store of everybody",
        file=ROUTES,
        old="if name is None:\n            return LOCAL_TIERS",
        new="if name is None:\n            return tuple(self._tiers)",
        test=OF_ROUTES + "test_a_store_is_emptied_only_by_name",
    ),
    Mutant(
        name="a flush of all leaves the store as it is",
        file=W + "loop.py",
        old='if "store" in tiers:',
        new="if False:",
        test=OVER_HTTP + "test_a_store_gives_back_what_device_and_host_lost_until_it_is_emptied",
        timeout_s=120,
    ),
    Mutant(
        name="a worker that died is waited for",
        file=ROUNDS,
        old="each.waiting.discard(replica)\n        self._conclude()",
        new="pass\n        self._conclude()",
        test=OF_ROUNDS + "test_a_worker_that_dies_is_waited_for_no_more_and_what_it_said_counts",
    ),
    Mutant(
        name="the first worker's answer is everybody's",
        file=ROUNDS,
        old="if not each.waiting]",
        new="if each.answers or not each.waiting]",
        test=OF_ROUNDS + "test_the_client_is_answered_when_the_last_worker_has_answered",
    ),
]

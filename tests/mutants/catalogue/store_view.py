"""Guards of what users see of the store, of idle workers and of dropped KV events."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

METRICS, STORE = "hiserve/server/cache_metrics.py", "hiserve/cache/pools/file_store.py"
LOOP, SERVICE = "hiserve/worker/loop.py", "hiserve/worker/service.py"
OF_METRICS = "tests/unit/server/test_cache_metrics.py::"
OF_ROUTES = "tests/unit/server/test_cache_routes.py::"
OF_TOP = "tests/unit/commands/test_top.py::"

MUTANTS = [
    Mutant(
        name="an idle worker sleeps until it is asked, whatever its threads do",
        file=SERVICE,
        old="until_writable=is_pending, timeout_s=IDLE_S",
        new="until_writable=is_pending",
        test="tests/unit/worker/test_service.py::test_an_idle_worker_tells_what_changes_meanwhile_by_itself",
    ),
    Mutant(
        name="the counts of a store wait for whoever lists its directory",
        file=STORE,
        old="        return StoreStats(\n            num_pages=len(self._sizes)",
        new="        with self._lock:\n            pass\n        return StoreStats(\n            num_pages=len(self._sizes)",
        test="tests/unit/pools/test_file_store.py::test_counts_are_told_while_the_directory_is_listed",
    ),
    Mutant(
        name="nobody is told what the store counts",
        file=LOOP,
        old="self._planner.stats(self._executor.store_stats(), ",
        new="self._planner.stats(None, ",
        test="tests/unit/worker/test_cache_stats.py::test_the_store_is_told_as_the_executor_counts_it",
    ),
    Mutant(
        name="nobody is told that KV events were dropped",
        file=LOOP,
        old="dropped = 0 if self._kv_events is None else self._kv_events.num_dropped",
        new="dropped = 0",
        test="tests/unit/worker/test_kv_events.py::test_what_was_dropped_is_in_the_engines_stats",
    ),
    Mutant(
        name="a store that two workers share counts twice",
        file=METRICS,
        old=".set(max((store.num_pages for store in stores), default=0))",
        new=".set(sum(store.num_pages for store in stores))",
        test=OF_METRICS + "test_workers_share_a_store_but_not_what_they_did_with_it",
    ),
    Mutant(
        name="what a store did is counted anew at each look",
        file=METRICS,
        old="self._count_store(before.store or StoreStats(), now.store)",
        new="self._count_store(StoreStats(), now.store)",
        test=OF_METRICS + "test_workers_share_a_store_but_not_what_they_did_with_it",
    ),
    Mutant(
        name="a tier that nothing is known of is shown as none",
        file="hiserve/server/cache_routes.py",
        old=" if tiers[tier] is not None},",
        new="},",
        test=OF_ROUTES + "test_the_store_is_shown_with_what_went_wrong",
    ),
    Mutant(
        name="the board adds up what replicas tell of the store that they share",
        file="hiserve/commands/top_frames.py",
        old='is_shared = name == "store" and key in SHARED',
        new="is_shared = False",
        test=OF_TOP + "test_one_frame_shows_tiers_hits_copies_requests_and_workers",
    ),
    Mutant(
        name="a tier without pages is not on the board",
        file="hiserve/commands/top_board.py",
        old="        if not pages:\n",
        new='        if not pages.get("num_pages"):\n',
        test=OF_TOP + "test_a_store_shows_its_size_of_what_it_may_have_and_its_last_error",
    ),
    Mutant(
        name="keys are printed with the settings",
        file="hiserve/commands/config.py",
        old='return "(hidden)" if setting.is_secret else str(value)',
        new="return str(value)",
        test="tests/unit/commands/test_config_command.py::test_what_is_not_given_is_empty_and_keys_are_hidden",
    ),
    Mutant(
        name="a segment whose secret differs is said to be of another model alone",
        file="hiserve/cache/pools/segment.py",
        old="other weights, or another --dtype, --store or --kv-canary",
        new="other weights or another dtype",
        test="tests/unit/pools/test_host_segment.py::"
        "test_a_name_whose_digests_know_another_secret_is_refused_with_what_can_have_changed",
    ),
]

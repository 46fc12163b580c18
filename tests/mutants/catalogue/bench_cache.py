"""Guards of ``hiserve bench cache``, of the endless cache it compares with, and of ``hiserve top``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ORACLE = "hiserve/bench/cache/oracle.py"
LOADS = "hiserve/bench/cache/loads.py"
FIGURES = "hiserve/bench/cache/figures.py"
SCRAPE = "hiserve/bench/scrape.py"
RUN = "hiserve/bench/cache/run.py"
LOAD = "hiserve/bench/load.py"
OF_ORACLE = "tests/unit/bench/cache/test_oracle.py::"
OF_LOADS = "tests/unit/bench/cache/test_loads.py::"
OF_FIGURES = "tests/unit/bench/cache/test_figures.py::"
OF_SCRAPE = "tests/unit/bench/test_scrape.py::"
COPIES = "hiserve/bench/cache/copies.py"
FRAMES = "hiserve/commands/top_frames.py"
BOARD = "hiserve/commands/top_board.py"
OF_COPIES = "tests/unit/bench/cache/test_copies.py::"
OF_TOP = "tests/unit/commands/test_top.py::"
OF_COMMAND = "tests/unit/commands/test_bench_cache.py::"

MUTANTS = [
    # --- the endless cache ---
    Mutant(
        name="an endless cache gives a prompt's last token",
        file=ORACLE,
        old="visit.prompt[:-1].tobytes()",
        new="visit.prompt.tobytes()",
        test=OF_ORACLE + "test_only_whole_pages_are_found_and_never_the_last_token",
    ),
    Mutant(
        name="an endless cache surely holds a reply's last token",
        file=ORACLE,
        old="visit.output[:-1].size",
        new="visit.output.size",
        test=OF_ORACLE + "test_the_page_that_the_last_token_of_a_reply_fills_may_be_held_or_not",
    ),
    Mutant(
        name="an endless cache finds a page wherever it stands",
        file=ORACLE,
        old="            node = child\n            most +=",
        new="            most +=",
        test=OF_ORACLE + "test_a_prefix_ends_where_the_tokens_differ",
    ),
    Mutant(
        name="tenants share an endless cache",
        file=ORACLE,
        old="        most = least = 0\n        node: _Node = visit.namespace",
        new="        most = least = 0\n        node: _Node = ''",
        test=OF_ORACLE + "test_namespaces_share_nothing",
    ),
    Mutant(
        name="an endless cache replays in the order given",
        file=ORACLE,
        old="key=lambda at: (visits[at].begin_s, at)",
        new="key=lambda at: at",
        test=OF_ORACLE + "test_the_order_is_that_of_sending_whatever_the_order_given",
    ),
    Mutant(
        name="what is being computed is there in any case",
        file=ORACLE,
        old="if self._ended_s[child] <= visit.begin_s:",
        new="if True:",
        test=OF_ORACLE + "test_what_is_still_being_computed_counts_as_the_most_and_not_as_the_least",
    ),
    Mutant(
        name="a page ends with the request that held it first",
        file=ORACLE,
        old="self._ended_s[child] = min(self._ended_s[child], visit.end_s)",
        new="pass",
        test=OF_ORACLE + "test_what_is_still_being_computed_counts_as_the_most_and_not_as_the_least",
    ),
    # --- what is sent ---
    Mutant(
        name="a session goes on without the prompt that did not fit",
        file=LOADS,
        old="                ended.add(row.session_id)\n",
        new="                pass\n",
        test=OF_LOADS + "test_a_session_ends_before_the_prompt_that_does_not_fit",
    ),
    Mutant(
        name="conversations outgrow the context",
        file=LOADS,
        old="    check_fits(made, target.max_model_len)\n",
        new="",
        test=OF_LOADS + "test_conversations_that_outgrow_the_context_are_refused",
    ),
    Mutant(
        name="recorded sessions ignore the scale",
        file=LOADS,
        old="shortened(row.input, load.length_scale)",
        new="row.input",
        test=OF_LOADS + "test_scaled_sessions_keep_what_they_share",
    ),
    Mutant(
        name="groups are visited all at once",
        file=LOAD,
        old="waiting[first : first + group_size]",
        new="waiting",
        test="tests/unit/bench/test_load.py::test_groups_are_visited_in_turn_and_grow_by_their_replies",
    ),
    Mutant(
        name="all tenants have one salt",
        file=RUN,
        old="return sample.session % len(self._clients)",
        new="return 0",
        test=OF_COMMAND + "test_tenants_share_nothing_there_nor_here",
    ),
    # --- figures ---
    Mutant(
        name="a hit is of the fastest tier",
        file=FIGURES,
        old="for tier in reversed(TIERS) if found[tier]",
        new="for tier in TIERS if found[tier]",
        test=OF_FIGURES + "test_a_hit_is_of_the_slowest_tier_and_at_least_half_of_the_prompt",
    ),
    Mutant(
        name="one page makes a hit",
        file=FIGURES,
        old="if sum(found.values()) < LEAST_HIT * sample.num_prompt:",
        new="if not sum(found.values()):",
        test=OF_FIGURES + "test_a_hit_is_of_the_slowest_tier_and_at_least_half_of_the_prompt",
    ),
    Mutant(
        name="failed requests count in hit rates",
        file=FIGURES,
        old="strict=True) if not sample.error]",
        new="strict=True)]",
        test=OF_FIGURES + "test_failures_count_nowhere",
    ),
    Mutant(
        name="a hit rate is made up",
        file=FIGURES,
        old="tells_cached = bool(fine) and all(sample.num_cached >= 0 for sample in fine)",
        new="tells_cached = True",
        test=OF_FIGURES + "test_a_server_that_tells_nothing_has_no_hit_rate",
    ),
    Mutant(
        name="a full cache at the start is not noticed",
        file=FIGURES,
        old="sum(sample.num_cached > of_it.most for",
        new="sum(False for",
        test=OF_FIGURES + "test_more_than_an_endless_cache_is_told",
    ),
    Mutant(
        name="a counter that began again falls",
        file=SCRAPE,
        old="value - past if value >= past else value",
        new="value - past",
        test=OF_SCRAPE + "test_what_grew_is_told_by_how_much_and_a_counter_that_fell_began_again",
    ),
    Mutant(
        name="gauges count as counters",
        file=SCRAPE,
        old='if name.endswith(("_total", "_sum", "_count")):',
        new="if True:",
        test=OF_SCRAPE + "test_what_grew_is_told_by_how_much_and_a_counter_that_fell_began_again",
    ),
    Mutant(
        name="a tier is any whose name begins so",
        file=SCRAPE,
        old='if key.partition("{")[0].rpartition(":")[2] == name and',
        new="if name in key and",
        test=OF_SCRAPE + "test_series_of_a_metric_are_summed_by_label",
    ),
    Mutant(
        name="tiers are told that are none",
        file="hiserve/bench/backends.py",
        old="if isinstance(count, int)}",
        new="}",
        test="tests/unit/bench/test_backends.py::test_the_native_reply_tells_the_store_as_storage",
    ),
    Mutant(
        name="copies of a worker's former life count",
        file=COPIES,
        old="begun.get((each.replica, each.incarnation), ReplicaCache())",
        new="before.replicas[each.replica]",
        test=OF_COPIES + "test_a_worker_that_began_again_counts_from_there",
    ),
    Mutant(
        name="a refused /cache/stats is read as one",
        file=COPIES,
        old="    if status != 200:\n        return",
        new="    if False:\n        return",
        test=OF_COPIES + "test_what_cannot_be_read_is_said",
    ),
    # --- the board ---
    Mutant(
        name="rates are of the whole time",
        file=FRAMES,
        old="self._frames[1].at_s <= frame.at_s - WINDOW_S",
        new="False",
        test=OF_TOP + "test_only_the_last_seconds_count_and_one_frame_before_them",
    ),
    Mutant(
        name="a counter that fell grows backwards",
        file=FRAMES,
        old="return max(0.0, value(self.newest) - value(self._frames[0]))",
        new="return value(self.newest) - value(self._frames[0])",
        test=OF_TOP + "test_a_counter_that_fell_did_not_grow",
    ),
    Mutant(
        name="without /cache/stats there is no device",
        file=FRAMES,
        old='if not found and name == "device" and self.workers:',
        new="if False:",
        test=OF_TOP + "test_without_cache_stats_the_device_is_what_the_workers_tell",
    ),
    Mutant(
        name="a server that shows nothing is shown",
        file=FRAMES,
        old="        if info is None and load is None:\n",
        new="        if False:\n",
        test=OF_TOP + "test_a_server_of_another_kind_is_told_in_one_line",
    ),
    Mutant(
        name="pages that are not ready are used",
        file=BOARD,
        old='pages.get("num_ready", pages.get("num_pages", 0))',
        new='pages["num_pages"]',
        test=OF_TOP + "test_one_frame_shows_tiers_hits_copies_requests_and_workers",
    ),
    Mutant(
        name="few pages are no part of a bar",
        file=BOARD,
        old="max(count / whole * width, 1.0 if count else 0.0)",
        new="count / whole * width",
        test=OF_TOP + "test_a_bar_shows_what_is_there_however_little",
    ),
    Mutant(
        name="a server that has gone away is not told",
        file="hiserve/commands/top.py",
        old="history.add(_next(reader))",
        new="history.add(reader.read())",
        test=OF_TOP + "test_the_board_ends_when_the_server_has_gone_and_says_so",
    ),
]

"""Guards of the store beyond the host: who waits, what is fetched, what may be stored, whose keys."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PREFETCH = "hiserve/worker/prefetch.py"
TRANSFERS = "hiserve/cache/pools/store_transfers.py"
STORES = "hiserve/cache/pools/file_store.py"
SEGMENT = "hiserve/cache/pools/identity.py"
OPS = "hiserve/cache/index/ops.py"
DIGEST = "hiserve/core/digest.py"
OF_PREFETCH = "tests/unit/worker/test_prefetch.py::"
OF_TRANSFERS = "tests/unit/pools/test_store_transfers.py::"
OF_STORES = "tests/unit/pools/test_stores.py::"
OF_DAMAGE = "tests/unit/pools/test_file_store_damage.py::"

MUTANTS = [
    Mutant(
        name="a marker that cannot be opened ends the start",
        file=STORES,
        old="""    except OSError as error:
        logger.warning("hiserve cache delete""",
        new="""    except FileExistsError as error:
        logger.warning("hiserve cache delete""",
        test="tests/unit/pools/test_file_store_damage.py::test_a_marker_that_cannot_be_opened_keeps_no_server_from_its_store",
    ),
    Mutant(
        name="an answer of the store wakes nobody",
        file=TRANSFERS,
        old="for digest in lookup.digests])))\n        self._wake()\n",
        new="for digest in lookup.digests])))\n",
        test="tests/unit/worker/test_copier.py::test_an_answer_of_the_store_ends_the_wait_for_copies",
    ),
    Mutant(
        name="a request waits for the store for ever",
        file=PREFETCH,
        old="        if self._clock() - want.since < self._max_wait_s:\n",
        new="        if self._max_wait_s:\n",
        test=OF_PREFETCH + "test_tc_44_a_request_is_let_go_by_its_deadline_whatever_the_store_does",
    ),
    Mutant(
        name="a prefetch that one of two gave up is dropped",
        file=PREFETCH,
        old="        if op and not any(other.op == op for other in self._wants.values()):\n",
        new="        if op:\n",
        test=OF_PREFETCH + "test_requests_of_one_prefix_share_its_prefetch",
    ),
    Mutant(
        name="a prefetch that nobody wants keeps its place",
        file=PREFETCH,
        old="            self._cache.abort_prefetch(op)\n",
        new="            pass\n",
        test=OF_PREFETCH + "test_tc_42_an_abort_at_any_step_gives_every_page_back_once",
    ),
    Mutant(
        name="a store that owes an answer is asked again",
        file=PREFETCH,
        old="            want.is_late = True\n",
        new="",
        test=OF_PREFETCH + "test_a_store_that_owes_an_answer_is_asked_nothing_until_it_comes",
    ),
    Mutant(
        name="what the store lost is asked for again and again",
        file=PREFETCH,
        old="                want.is_over |= want is order.want and not ack.is_ok\n",
        new="",
        test=OF_PREFETCH + "test_what_the_store_has_lost_meanwhile_is_not_asked_for_again",
    ),
    Mutant(
        name="requests that never asked are kept",
        file=PREFETCH,
        old="        self._to_ask.pop(want.request.uid, None)\n",
        new="",
        test=OF_PREFETCH + "test_requests_that_never_get_to_ask_leave_nothing",
    ),
    Mutant(
        name="a prefix is fetched in one piece",
        file=PREFETCH,
        old="min(want.end - want.num_cached - want.num_arrived, MAX_PAGES)",
        new="want.end - want.num_cached - want.num_arrived",
        test=OF_PREFETCH + "test_a_long_prefix_comes_in_pieces_that_can_be_used_at_once",
    ),
    Mutant(
        name="prefetches are not bounded",
        file=PREFETCH,
        old="            elif num_open < MAX_PREFETCHES:\n",
        new="            else:\n",
        test=OF_PREFETCH + "test_lookups_and_prefetches_are_bounded",
    ),
    Mutant(
        name="a request waits for a host that is full",
        file=PREFETCH,
        old="            self._give_up(want, HOST_FULL)\n",
        new="            pass\n",
        test=OF_PREFETCH + "test_a_prefetch_that_cannot_be_placed_ends_at_once",
    ),
    Mutant(
        name="what cannot be in time is fetched",
        file=PREFETCH,
        old="            return 0, TOO_LATE\n",
        new="            return num_pages, TOO_LATE\n",
        test=OF_PREFETCH + "test_a_prefetch_that_cannot_be_in_time_is_not_begun",
    ),
    Mutant(
        name="what the store has is said to be new",
        file="hiserve/worker/admitter.py",
        old="num_cached, is_in_store=is_in_store)",
        new="num_cached)",
        test="tests/e2e/test_store_tier.py::test_with_a_full_host_nobody_waits_for_the_store_and_the_miss_says_why",
    ),
    Mutant(
        name="the end of an engine waits for no upload",
        file="hiserve/worker/loop.py",
        old="        while self.is_copying and time.monotonic() < end_s:\n",
        new="        while False:\n",
        test="tests/e2e/test_store_at_the_end.py::test_what_waits_when_an_engine_is_closed_is_uploaded_first",
    ),
    Mutant(
        name="the end of an engine waits for a store that answers nothing",
        file=PREFETCH,
        old="        return self._clock() - max(oldest_s, self._answered_s) < STALL_S\n",
        new="        return True\n",
        test=OF_PREFETCH + "test_a_store_that_answers_nothing_is_given_up_at_the_end",
    ),
    Mutant(
        name="a stopped server uploads nothing more",
        file="hiserve/scheduler/client.py",
        old="encode(Stop(copy_s))",
        new="encode(Stop())",
        test="tests/e2e/test_store_at_the_end.py::test_sigterm_lets_pages_reach_a_slow_store",
    ),
    Mutant(
        name="an idle engine forgets what it ordered",
        file=PREFETCH,
        old="        return oldest is not None and self._clock() - oldest.since < PATIENCE_S\n",
        new="        return False\n",
        test=OF_PREFETCH + "test_tc_41_orders_are_polled_for_while_idle_but_not_for_ever",
    ),
    Mutant(
        name="an idle engine polls a store that hangs for ever",
        file=PREFETCH,
        old="        return oldest is not None and self._clock() - oldest.since < PATIENCE_S\n",
        new="        return oldest is not None\n",
        test=OF_PREFETCH + "test_tc_41_orders_are_polled_for_while_idle_but_not_for_ever",
    ),
    Mutant(
        name="uploads hand on runs of nothing",
        file=OPS,
        old="                if is_read.any():  # of runs of nothing, each end would hand ever more on\n",
        new="                if True:\n",
        test=OF_PREFETCH + "test_uploads_that_outlive_a_flush_give_each_page_back_once",
    ),
    Mutant(
        name="damage of the host is stored with a checksum of its own",
        file=TRANSFERS,
        old="        num_intact = (*is_intact, False).index(False)\n",
        new="        num_intact = len(is_intact)\n",
        test=OF_TRANSFERS + "test_a_page_that_is_not_what_was_written_is_not_stored",
    ),
    Mutant(
        name="pages that did not arrive stay taken",
        file=TRANSFERS,
        old="        self._host.free(run.pages[count:])\n",
        new="",
        test=OF_TRANSFERS + "test_pages_that_do_not_arrive_are_free_again",
    ),
    Mutant(
        name="late bytes become valid after the end",
        file=TRANSFERS,
        old="            return  # nobody takes the ack; pages that are not VALID are adopted by nobody\n",
        new="            pass\n",
        test=OF_TRANSFERS + "test_what_hangs_keeps_its_own_pages_and_hinders_neither_others_nor_the_end",
    ),
    Mutant(
        name="uploads take all of the medium",
        file=TRANSFERS,
        old="        self._is_closing.wait(count * self._upload_s_per_page)\n",
        new="",
        test=OF_TRANSFERS + "test_uploads_keep_to_their_rate",
    ),
    Mutant(
        name="the end waits for what hangs",
        file=TRANSFERS,
        old="            thread.join(max(0.0, deadline - time.monotonic()))\n",
        new="            thread.join(2)\n",
        test=OF_TRANSFERS + "test_the_end_waits_for_no_store_that_never_answers",
    ),
    Mutant(
        name="the draft's revision is not in the key",
        file=TRANSFERS,
        old="store_key(digest, run.draft_revision)",
        new="store_key(digest)",
        test=OF_TRANSFERS + "test_pages_of_another_draft_revision_are_not_found",
    ),
    Mutant(
        name="a secret is written into a directory of somebody else",
        file=STORES,
        old='    _claim(directory)\n    return read_secret(directory / f"{MARKER}.secret")\n',
        new='    return read_secret(directory / f"{MARKER}.secret")\n',
        test=OF_STORES + "test_the_secret_of_a_directory_that_is_no_store_is_not_made",
    ),
    Mutant(
        name="a page is written in place",
        file=STORES,
        old='            draft = f"{path}.{self._tag}-{self._num_drafts}.new"\n',
        new="            draft = path\n",
        test=OF_DAMAGE + "test_a_page_appears_whole_or_not_at_all",
    ),
    Mutant(
        name="a FIFO in the place of a page hangs whoever reads it",
        file=STORES,
        old="os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW",
        new="os.O_RDONLY | os.O_NOFOLLOW",
        test=OF_DAMAGE + "test_a_chain_of_what_is_no_page_is_replaced_in_one_round",
    ),
    Mutant(
        name="damaged pages are replaced one a round",
        file=STORES,
        old="                self._doubt(keys[count:])\n",
        new="                pass\n",
        test=OF_DAMAGE + "test_a_chain_of_what_is_no_page_is_replaced_in_one_round",
    ),
    Mutant(
        name="a store that a server uses is deleted",
        file="hiserve/cache/pools/inventory.py",
        old='        _take(fd, f"the store file:{directory}")\n',
        new="",
        test="tests/unit/commands/test_cache_command.py::test_what_a_server_uses_is_left_alone",
    ),
    Mutant(
        name="a named segment hides the store's secret",
        file=SEGMENT,
        old="    if config.cache.store is not None:\n",
        new="    if config.cache.store is not None and config.cache.host_cache_name is None:\n",
        test=OF_STORES + "test_the_store_gives_the_secret_of_the_namespace_even_where_the_segment_has_a_name",
    ),
    Mutant(
        name="digests of a store can be made to collide",
        file=DIGEST,
        old="    return strong_chain if is_strong else chain\n",
        new="    return chain\n",
        test="tests/unit/core/test_digest.py::test_a_store_wants_the_chain_that_nobody_can_make_collide",
    ),
    Mutant(
        name="who leaves a named host cache behind drops what is on its way there",
        file="hiserve/worker/build.py",
        old="has_heirs=config.cache.store is not None or config.cache.host_cache_name is not None",
        new="has_heirs=config.cache.store is not None",
        test="tests/unit/worker/test_build_host.py::test_only_who_leaves_pages_behind_finishes_copies_at_the_end",
    ),
]

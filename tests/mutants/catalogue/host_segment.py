"""Guards of the host segment: its size and its name, whose it is, and what is adopted of it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RESOLVE = "hiserve/core/resolve.py"
HOME = "hiserve/cache/pools/host_segment.py"
POOLS_IDENTITY = "hiserve/cache/pools/identity.py"
HOST = "hiserve/cache/pools/host.py"
QUEUE = "hiserve/cache/pools/transfer_queue.py"
SUPERVISOR = "hiserve/scheduler/supervisor.py"
ADOPT = "hiserve/worker/adopt.py"
BUILD = "hiserve/worker/build.py"
TRANSFERS = "hiserve/cache/index/transfers.py"
OF_RESOLVE = "tests/unit/core/test_resolve.py::"
OF_HOME = "tests/unit/pools/test_host_segment.py::"
OF_HOST = "tests/unit/pools/test_host_pool.py::"
OF_SUPERVISOR = "tests/unit/scheduler/test_supervisor.py::"
OF_RESTART = "tests/e2e/test_host_restart.py::"
OF_BUILD = "tests/unit/worker/test_build_host.py::"
OF_TIERS = "tests/unit/cache/test_tiers.py::"
REFUSED = OF_RESOLVE + "test_what_does_not_fit_names_what_to_change"
FOLLOWS = OF_RESOLVE + "test_the_host_cache_follows_memory_and_pool"

MUTANTS = [
    # --- how large ---
    Mutant(
        name="a host cache may be larger than memory",
        file=RESOLVE,
        old='    if size > room:\n        raise ResourceError(\n            f"the host cache',
        new='    if False:\n        raise ResourceError(\n            f"the host cache',
        test=REFUSED,
    ),
    Mutant(
        name="a named host cache may be larger than /dev/shm",
        file=RESOLVE,
        old='room, where = min((room, where), (shm, "/dev/shm"))',
        new="pass",
        test=REFUSED,
    ),
    Mutant(
        name="a named auto takes no notice of /dev/shm",
        file=RESOLVE,
        old="shares.append(shm // 2)",
        new="pass",
        test=FOLLOWS,
    ),
    Mutant(
        name="a host cache beside a cache that is disabled",
        file=RESOLVE,
        old="    if cache.disable_prefix_cache:\n        return 0.0",
        new="    if False:\n        return 0.0",
        test=FOLLOWS,
    ),
    Mutant(
        name="a segment that is there loses its size",
        file=RESOLVE,
        old="size = machine.kept_bytes or min(shares)",
        new="size = min(shares)",
        test=FOLLOWS,
    ),
    Mutant(
        name="a host cache of one page",
        file=RESOLVE,
        old="if size < 2 * page:  # one is nobody's",
        new="if False:",
        test=OF_RESOLVE + "test_a_host_cache_of_less_than_two_pages_is_none_and_says_why",
    ),
    Mutant(
        name="what a segment takes is not counted as available to it",
        file=HOME,
        old="taken += segment_path(name, directory).stat().st_blocks * 512",
        new="pass",
        test=OF_HOME + "test_a_segment_that_is_there_keeps_its_size_and_counts_as_room",
    ),
    # --- whose ---
    Mutant(
        name="digests know no secret",
        file=POOLS_IDENTITY,
        old="            secret=server_secret(config, directory),\n",
        new="",
        test=OF_HOME + "test_digests_know_the_secret_of_a_name_and_nothing_else_has_one",
    ),
    Mutant(
        name="replicas share a segment",
        file=HOME,
        old='f"{name}-{replica}" for replica in range(count)',
        new="name for replica in range(count)",
        test=OF_HOME + "test_each_replica_has_a_file_of_its_own",
    ),
    Mutant(
        name="a page size does not tell caches apart",
        file="hiserve/models/identity.py",
        old="layout, str(page_size), shard",
        new="layout, shard",
        test=OF_HOME + "test_what_changes_the_bytes_of_a_page_changes_its_namespace",
    ),
    Mutant(
        name="the cache does not know which divisors of longrope its keys were rotated with",
        file="hiserve/models/identity.py",
        old="rope=model.rope.fixed(max_len)",
        new="rope=model.rope",
        test="tests/unit/models/test_identity.py::test_longrope_has_a_cache_for_each_list_of_divisors",
    ),
    Mutant(
        name="the parsed configuration is no part of a cache's identity",
        file="hiserve/models/identity.py",
        old="namespace_digest(secret, shape, ",
        new="namespace_digest(secret, ",
        test="tests/e2e/test_cache_identity.py::test_a_store_gives_an_edited_model_nothing",
    ),
    Mutant(
        name="each incarnation has a segment of its own",
        file=SUPERVISOR,
        old="        segment = self._segments[replica]\n",
        new="        segment = open_segment(self._config, replica)\n",
        test=OF_SUPERVISOR + "test_each_replica_has_a_segment_that_its_incarnations_share",
    ),
    Mutant(
        name="segments stay when the supervisor has ended",
        file=SUPERVISOR,
        old="                if segment is not None:\n                    segment.close()",
        new="                pass",
        test=OF_SUPERVISOR + "test_nothing_is_left_of_a_segment_when_the_supervisor_has_ended",
    ),
    Mutant(
        name="a segment that cannot be had is nobody's error",
        file=SUPERVISOR,
        old="            self.started.set_exception(error)\n        finally",
        new="            pass\n        finally",
        test=OF_SUPERVISOR + "test_a_segment_that_cannot_be_had_fails_the_start_with_its_error",
        timeout_s=60,
    ),
    Mutant(
        name="a worker serves files that have changed since the server started",
        file=POOLS_IDENTITY,
        old="identity.shape != shape or identity.files != _files(config, folder, draft)",
        new="False",
        test=OF_BUILD + "test_files_that_changed_since_the_server_started_are_refused",
    ),
    # --- when it is pinned ---
    Mutant(
        name="pinning never rests while steps run",
        file="hiserve/cache/pools/touch.py",
        old="if now_s > self._step_s + _IDLE_S:",
        new="if True:",
        test="tests/unit/pools/test_touch.py::test_pinning_takes_a_small_share_of_the_time_while_steps_run",
    ),
    Mutant(
        name="pinning does not know of steps",
        file="hiserve/worker/copier.py",
        old="        self._host.touch.pace.step()\n",
        new="",
        test="tests/unit/worker/test_copier.py::test_each_step_tells_pinning_to_leave_the_device_to_it",
    ),
    # --- what of it ---
    Mutant(
        name="adopted pages are not findable",
        file=ADOPT,
        old="num_pages = cache.adopt(runs)",
        new="num_pages = 0",
        test=OF_RESTART + "test_a_named_cache_survives_the_engine",
        timeout_s=60,
    ),
    Mutant(
        name="pages are adopted whose memory is not there",
        file=ADOPT,
        old="        host.clear()\n        runs = []",
        new="        pass",
        test=OF_BUILD + "test_nothing_is_adopted_whose_memory_cannot_be_had",
    ),
    Mutant(
        name="adopted pages are trusted",
        file=HOST,
        old="            self._is_foreign[run.pages] = True",
        new="            pass",
        test=OF_HOST + "test_pages_of_a_former_process_are_read_before_their_first_use",
    ),
    Mutant(
        name="pages are foreign for ever",
        file=HOST,
        old="        self._is_foreign[run.pages] = False",
        new="        pass",
        test=OF_HOST + "test_an_adopted_page_that_is_written_anew_is_foreign_no_more",
    ),
    Mutant(
        name="adopted pages are read before every use",
        file=HOST,
        old="            self._is_foreign[page] = False",
        new="            pass",
        test=OF_HOST + "test_pages_of_a_former_process_are_read_before_their_first_use",
    ),
    Mutant(
        name="garbled pages are loaded",
        file=QUEUE,
        old="if copy.kind is not CopyKind.LOAD or self._host.is_intact(copy.host_pages):",
        new="if True:",
        test=OF_RESTART + "test_garbled_pages_are_counted_and_computed_again",
        timeout_s=60,
    ),
    Mutant(
        name="what finds no place on a host that grows is forgotten",
        file=TRANSFERS,
        old="bool(self._queue) and tiers.host.num_unused > 0",
        new="bool(self._queue)",
        test=OF_TIERS + "test_what_is_published_before_a_host_page_is_ready_waits_for_one",
    ),
    Mutant(
        name="pages at the end are left without a checksum",
        file="hiserve/worker/copier.py",
        old="        self._host.wait_checksums(self._linger_s)\n",
        new="",
        test=OF_BUILD + "test_pages_that_outlive_the_server_get_their_checksums_at_the_end",
    ),
    Mutant(
        name="the host never grows",
        file="hiserve/worker/planner.py",
        old="            self._cache.grow_host(num_pages)",
        new="            pass",
        test=OF_BUILD + "test_a_host_that_is_made_ready_late_takes_what_was_published_before",
    ),
]

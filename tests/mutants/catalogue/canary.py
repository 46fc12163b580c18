"""Guards of the canary, of an engine whose step has failed, of what a step may cost, and of what must not stay."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CANARY = "hiserve/runners/canary.py"
DISPATCH = "hiserve/runners/dispatch.py"
LOADING = "hiserve/worker/loading.py"
OF_CANARY = "tests/unit/runners/test_canary.py::"
OF_ENGINE = "tests/e2e/test_canary.py::"
OF_MATRIX = "tests/e2e/test_equality_matrix.py::test_the_tokens_are_those_of_an_engine_without_cache"

MUTANTS = [
    Mutant(
        name="nobody remembers that a prefix must be checked",
        file=CANARY,
        old="self._due.update(table.rows[is_filled].tolist())",
        new="pass",
        test=OF_CANARY + "test_a_prefix_that_holds_something_else_is_named",
    ),
    Mutant(
        name="a row that moves to other pages is not checked again",
        file=CANARY,
        old="is_filled = table.indices * self._rows.page_size < computed_len[table.rows]",
        new="is_filled = np.isin(table.rows, [each.row for each in plan.admit])",
        test=OF_CANARY + "test_a_row_that_moves_to_pages_of_others_is_checked_again",
    ),
    Mutant(
        name="tokens are checked without their positions",
        file=CANARY,
        old="wrong = (tokens != expected) | (places != positions)",
        new="wrong = tokens != expected",
        test=OF_CANARY + "test_the_same_tokens_elsewhere_do_not_pass",
    ),
    Mutant(
        name="positions are checked without their tokens",
        file=CANARY,
        old="wrong = (tokens != expected) | (places != positions)",
        new="wrong = places != positions",
        test=OF_CANARY + "test_a_prefix_that_holds_something_else_is_named",
    ),
    Mutant(
        name="rows that the step refuses are checked",
        file=CANARY,
        old="plan.rows[inputs.legal.cpu().numpy()].tolist()",
        new="plan.rows.tolist()",
        test=OF_CANARY + "test_a_row_that_the_step_refuses_is_not_checked",
    ),
    Mutant(
        name="prefixes are read unchecked",
        file=DISPATCH,
        old="            self._canary.verify(plan, inputs)\n",
        new="",
        test=OF_ENGINE + "test_a_garbled_device_page_stops_the_engine",
    ),
    Mutant(
        name="slots are not marked",
        file=DISPATCH,
        old="            self._canary.write(forward)\n",
        new="",
        test=OF_ENGINE + "test_a_page_of_each_tier_passes",
    ),
    Mutant(
        name="a copy brings page i to where page j belongs",
        file="hiserve/cache/pools/transfer.py",
        old="theirs = torch.from_numpy(copy.host_pages).long()",
        new="theirs = torch.from_numpy(copy.host_pages).long().roll(int(is_load))",
        test=OF_ENGINE + "test_a_page_of_each_tier_passes",
    ),
    Mutant(
        name="pages with and without a canary share digests",
        file="hiserve/cache/pools/identity.py",
        old="debug_groups=[group.name for group in debug_groups(config)],",
        new="debug_groups=[],",
        test=OF_ENGINE + "test_the_debug_group_is_part_of_what_keeps_caches_apart",
    ),
    Mutant(
        name="memory is planned without the canary",
        file="hiserve/core/resolve.py",
        old=" + sum(group.slot_bytes for group in debug_groups(config))",
        new="",
        test="tests/unit/core/test_resolve.py::test_a_canary_is_part_of_every_page",
    ),
    Mutant(
        name="an engine whose step has failed says that it has work",
        file="hiserve/worker/loop.py",
        old="        self._is_sound = False  # until this one has not\n",
        new="",
        test="tests/unit/worker/test_engine_loop.py::test_a_step_that_fails_ends_the_engine",
    ),
    Mutant(
        name="any number of stores begins with a plan",
        file="hiserve/cache/index/transfers.py",
        old=" and len(copies) < max_copies:",
        new=":",
        test="tests/unit/cache/test_tiers.py::test_what_waits_for_its_turn_to_be_stored_grows_meanwhile",
    ),
    Mutant(
        name="more pages are handed out than are free",
        file="hiserve/cache/index/pages.py",
        old="self._hand_out(self._pop(count)) if count <= self.num_free else None",
        new="self._hand_out(self._pop(min(count, self.num_free)))",
        test="tests/unit/cache/test_pages.py::test_whoever_wishes_for_none_gets_what_comes_first",
    ),
    Mutant(
        name="a load that failed is taken for one that arrived",
        file=LOADING,
        old="self._cache.settle(ack.op, ok=ack.is_ok)",
        new="self._cache.settle(ack.op, ok=True)",
        test=OF_MATRIX + "[failed_loads-0_over-depth_0-greedy]",
    ),
    Mutant(
        name="a host page that was garbled is loaded",
        file="hiserve/cache/pools/host.py",
        old="            if not is_unsealed and not self.verify(page):",
        new="            if False:",
        test=OF_MATRIX + "[garbled_pages-0_over-depth_0-greedy]",
    ),
]

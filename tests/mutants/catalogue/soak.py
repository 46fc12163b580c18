"""Guards of ``hiserve bench soak``: that its oracle sees what must not be, and that its faults strike what they say."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FAULTS = "hiserve/bench/soak/faults.py"
FIGURES = "hiserve/bench/soak/figures.py"
HTTP = "hiserve/bench/http.py"
JUDGE = "hiserve/bench/soak/judge.py"
MEMORY = "hiserve/bench/soak/memory.py"
RECOVERY = "hiserve/bench/soak/recovery.py"
OF_FAULTS = "tests/unit/bench/soak/test_faults.py::"
OF_FIGURES = "tests/unit/bench/soak/test_figures.py::"
OF_JUDGE = "tests/unit/bench/soak/test_judge.py::"

MUTANTS = [
    Mutant(
        name="a soak compares the lengths of replies alone",
        file=JUDGE,
        old="is_same = sample.output_ids == reference.ids[: len(sample.output_ids)]",
        new="is_same = len(sample.output_ids) <= len(reference.ids)",
        test=OF_JUDGE + "test_another_token_is_a_violation_however_the_stream_ended",
    ),
    Mutant(
        name="a reply may lack its end in a soak",
        file=JUDGE,
        old="(len(sample.output_ids), sample.finish) != (len(reference.ids), reference.finish)",
        new="sample.finish != reference.finish",
        test=OF_JUDGE + "test_a_reply_that_ends_otherwise_is_a_violation",
    ),
    Mutant(
        name="a stream may end twice in a soak",
        file=JUDGE,
        old="sample.num_ends > 1",
        new="sample.num_ends > 2",
        test=OF_JUDGE + "test_a_stream_ends_once",
    ),
    Mutant(
        name="any fault excuses a stream that fails",
        file=JUDGE,
        old="window.may_fail and window.overlaps(sample)",
        new="window.overlaps(sample)",
        test=OF_JUDGE + "test_an_error_event_is_excused_by_a_fault_that_the_request_met",
    ),
    Mutant(
        name="a fault excuses whoever comes after it",
        file=JUDGE,
        old="return sample.begin_s <= self.end_s and self.begin_s <= sample.end_s",
        new="return self.begin_s <= sample.end_s",
        test=OF_JUDGE + "test_an_error_event_is_excused_by_a_fault_that_the_request_met",
    ),
    Mutant(
        name="a cut connection is excused like an error event",
        file=JUDGE,
        old='sample.error == "error event" and is_excused',
        new="is_excused",
        test=OF_JUDGE + "test_nothing_else_is_excused",
    ),
    Mutant(
        name="a refusal may come behind tokens",
        file=JUDGE,
        old="sample.error in REFUSALS and not sample.output_ids",
        new="sample.error in REFUSALS",
        test=OF_JUDGE + "test_a_refusal_is_none_once_there_were_tokens",
    ),
    Mutant(
        name="nonsense may be answered like sense",
        file=JUDGE,
        old="if 400 <= sample.status < 500:",
        new="if sample.status < 500:",
        test=OF_JUDGE + "test_nonsense_is_told_so",
    ),
    Mutant(
        name="a server that does not come back has survived",
        file=RECOVERY,
        old="return self.fault in SIGNALS and self.token_s is None",
        new="return False",
        test=OF_FIGURES + "test_a_server_that_does_not_come_back_is_a_violation",
    ),
    Mutant(
        name="a server that refuses everything has survived",
        file=FIGURES,
        old='violations.append("no request was answered")',
        new="pass",
        test=OF_FIGURES + "test_a_server_that_answers_nothing_has_not_survived",
    ),
    Mutant(
        name="memory grows from the first sample on",
        file=MEMORY,
        old="begin_s = min(WARM_UP * float(seconds[-1]), MAX_WARM_UP_S)",
        new="begin_s = 0.0",
        test=OF_FIGURES + "test_a_slope_is_of_what_follows_the_warm_up",
    ),
    Mutant(
        name="pages without a checksum are garbled, which nobody can notice",
        file=FAULTS,
        old=' & (segment.records["checksum"] != NO_CHECKSUM)',
        new="",
        test=OF_FAULTS + "test_bits_are_flipped_in_pages_that_have_a_checksum_and_in_no_others",
    ),
    Mutant(
        name="workers stay stopped after a flip",
        file=FAULTS,
        old="os.kill(pid, signal.SIGCONT)",
        new="os.kill(pid, 0)",
        test=OF_FAULTS + "test_bits_are_flipped_in_pages_that_have_a_checksum_and_in_no_others",
    ),
    Mutant(
        name="bits are flipped where nobody looks",
        file=FAULTS,
        old='if config.cache.cache_verify != "all" or config.cache.host_cache_gib == 0:',
        new="if config.cache.host_cache_gib == 0:",
        test=OF_FAULTS + "test_the_settings_say_what_can_strike",
    ),
    Mutant(
        name="a slow reader reads as fast as it can",
        file=HTTP,
        old="self._transport.pause_reading()",
        new="pass",
        test="tests/unit/bench/test_http.py::test_a_slow_reader_takes_its_time_and_gets_everything",
    ),
]

"""Benchmarks."""

from hiserve.bench import cache_summary
from hiserve.bench.soak import server_process, soak_summary
from tests.unit.bench import test_cache_summary
from tests.unit.bench.soak import test_server_process, test_stream_oracle

with cache_summary._Pages.add, test_cache_summary.test_the_page_that_the_last_token_of_a_reply_fills_may_be_held_or_not:
    "bench cache: the best cache surely holds the last token of a reply"
    visit.output[:-1]
    visit.output
with soak_summary.StreamOracle.judge, test_stream_oracle.test_another_token_is_a_violation_however_the_stream_ended:
    "INV 60: soak compares only the lengths of replies"
    sample.output_ids == reference.ids[: len(sample.output_ids)]
    len(sample.output_ids) <= len(reference.ids)
with server_process.RunningServer._files, test_server_process.test_files_that_a_process_removes_late_are_no_left_overs:
    "soak: a file counts as left behind while a process that was never seen removes it"
    not left or loop.time() >= deadline
    True

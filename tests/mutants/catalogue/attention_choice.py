"""Guards of which attention computes which rows: in graphs, in pairs, within windows."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OF_COVERAGE = "tests/unit/runners/test_graph_coverage.py::"

MUTANTS = [
    Mutant(
        name="the reference is captured though its plans make tensors",
        file="hiserve/attention/reference.py",
        old='        """Returns none."""\n',
        new="        return self\n",
        test=OF_COVERAGE + "test_steps_of_a_backend_that_cannot_be_captured_run_without_full_graphs",
    ),
    Mutant(
        name="sizes without attention are covered",
        file="hiserve/runners/graph.py",
        old="buckets=tuple(sorted(self._captured.keys() | {num_rows for num_rows, _ in self.failed})),",
        new="buckets=self._buckets,",
        test=OF_COVERAGE + "test_sizes_that_attention_has_nothing_for_are_left_out",
    ),
    Mutant(
        name="a width without any graph counts as covered",
        file="hiserve/runners/dispatch.py",
        old=" if (covered := runner.coverage).buckets},",
        new=" if (covered := runner.coverage)},",
        test=OF_COVERAGE + "test_steps_of_a_backend_that_cannot_be_captured_run_without_full_graphs",
    ),
]

"""Guards of the gate: what a step waits for, what defers it, and what graphs do not cover."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GATE = "hiserve/runners/gate.py"
COPIER = "hiserve/worker/copier.py"
OF_GATE = "tests/unit/runners/test_gate.py::"
OF_READS = OF_GATE + "test_a_step_runs_exactly_when_all_it_reads_is_there_or_on_its_way"
OF_ORACLE = "tests/unit/runners/test_gate_oracle.py::test_precise_replays_whatever_is_ordered_and_nothing_else"
OF_STRICT = "tests/unit/runners/test_gate_oracle.py::test_strict_refuses_replay_exactly_while_any_load_is_under_way"
OF_LIMITS = OF_GATE + "test_a_step_is_replayed_exactly_when_every_limit_of_some_graph_holds"
OF_EAGER = OF_GATE + "test_a_step_that_no_graph_covers_runs_eagerly_and_waits_for_its_loads_all_the_same"
OF_UNIFORM = OF_GATE + "test_rows_that_differ_or_do_not_sample_are_no_decode_or_verify_step"
OF_COPIER = "tests/unit/worker/test_copier.py"

MUTANTS = [
    Mutant(
        name="a step runs although what it reads failed to load",
        file=GATE,
        old="any(op in loads.failed for op in plan.waits)",
        new="False",
        test=OF_READS,
    ),
    Mutant(
        name="a step waits for a load that was never started",
        file=GATE,
        old="all(op <= loads.last_started for op in plan.waits)",
        new="True",
        test=OF_GATE + "test_a_step_waits_for_no_load_that_was_never_started",
    ),
    Mutant(
        name="a step waits for a load that has ended",
        file=GATE,
        old="tuple(op for op in plan.waits if op in loads.open)",
        new="plan.waits",
        test=OF_READS,
    ),
    Mutant(
        name="a step waits for the loads of others",
        file=GATE,
        old="tuple(op for op in plan.waits if op in loads.open)",
        new="tuple(sorted(loads.open))",
        test=OF_ORACLE,
    ),
    Mutant(
        name="a step is replayed without waiting for what it reads",
        file=GATE,
        old="return Verdict(Action.REPLAY, reason, waits, full, step.sampling)",
        new="return Verdict(Action.REPLAY, reason, (), full, step.sampling)",
        test=OF_ORACLE,
    ),
    Mutant(
        name="an eager step does not wait for what it reads",
        file=GATE,
        old="return Verdict(Action.EAGER, refusal, waits, sampling=step.sampling)",
        new="return Verdict(Action.EAGER, refusal, sampling=step.sampling)",
        test=OF_EAGER,
    ),
    Mutant(
        name="a strict gate replays beside loads of others",
        file=GATE,
        old="coverage.is_strict and bool(loads.open)",
        new="False",
        test=OF_STRICT,
    ),
    Mutant(
        name="a strict gate replays beside a step that may read what has moved",
        file=GATE,
        old="coverage.is_strict and has_moved",
        new="False",
        test="tests/e2e/test_relocations.py::test_a_strict_gate_replays_nothing_while_a_page_moves",
    ),
    Mutant(
        name="a precise gate replays nothing beside loads",
        file=GATE,
        old="coverage.is_strict and bool(loads.open)",
        new="bool(loads.open)",
        test=OF_ORACLE,
    ),
    Mutant(
        name="a row that does not sample is decoded by a graph in which it does",
        file=GATE,
        old="plan.samples.all() and (num_new == width).all()",
        new="(num_new == width).all()",
        test=OF_UNIFORM,
    ),
    Mutant(
        name="rows of different widths are replayed in one graph",
        file=GATE,
        old="plan.samples.all() and (num_new == width).all()",
        new="plan.samples.all()",
        test=OF_UNIFORM,
    ),
    Mutant(
        name="part of a prompt is replayed as if it were drafts",
        file=GATE,
        old=" and (plan.num_draft == width - 1).all()",
        new="",
        test=OF_UNIFORM,
    ),
    Mutant(
        name="a row longer than the graph's rows is replayed",
        file=GATE,
        old="(Reason.CONTEXT, step.max_len > graphs.max_len)",
        new="(Reason.CONTEXT, False)",
        test=OF_LIMITS,
    ),
    Mutant(
        name="a graph is replayed whose capture failed",
        file=GATE,
        old="(Reason.CAPTURE_FAILED, bucket in graphs.failed),",
        new="",
        test=OF_LIMITS,
    ),
    Mutant(
        name="pieces are replayed whose capture failed",
        file=GATE,
        old="Reason.CAPTURE_FAILED if bucket in graphs.failed else bucket",
        new="bucket",
        test=OF_EAGER,
    ),
    Mutant(
        name="more rows are replayed than the graph has",
        file=GATE,
        old="buckets[index] if size and index < len(buckets) else 0",
        new="buckets[min(index, len(buckets) - 1)] if size else 0",
        test=OF_LIMITS,
    ),
    Mutant(
        name="the copier forgets which load it started last",
        file=COPIER,
        old="                self._last_load = copy.op\n",
        new="",
        test=OF_COPIER,
    ),
    Mutant(
        name="a load that failed counts as arrived",
        file=COPIER,
        old="                    self._failed_loads.append(ack.op)\n",
        new="                    pass\n",
        test=OF_COPIER,
    ),
]

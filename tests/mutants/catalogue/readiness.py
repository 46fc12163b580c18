"""Guards of the readiness check: what the scan sees, what a step is compared with, what is counted of the gate."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SCAN = "hiserve/commands/graph_scan.py"
TYPES = "hiserve/commands/graph_types.py"
DOCTOR = "hiserve/commands/doctor_graphs.py"
READINESS = "hiserve/worker/readiness.py"
METRICS = "hiserve/server/metrics.py"
OF_SCAN = "tests/unit/test_graph_scan.py::"
OF_CAUGHT = OF_SCAN + "test_each_pattern_is_caught"
OF_HARMLESS = OF_SCAN + "test_what_does_no_harm_is_not_caught"
OF_EXCEPTION = OF_SCAN + "test_an_exception_covers_its_function_and_pattern_alone_and_is_told_when_it_covers_nothing"
OF_DOCTOR = "tests/unit/commands/test_doctor_graphs.py::test_it_is_ready_when_neither_the_code_nor_a_step_is_wrong"
OF_READINESS = "tests/unit/worker/test_readiness.py::"
OF_LATE = OF_READINESS + "test_drafts_that_come_late_make_no_difference"
OF_DRAFTS = OF_READINESS + "test_steps_are_checked_with_what_drafts_behind_them"

MUTANTS = [
    Mutant(
        name="a mask in a name is not seen",
        file=TYPES,
        old="return Kind.MASK if any(map(self.is_tensor, (node.left",
        new="return Kind.TENSOR if any(map(self.is_tensor, (node.left",
        test=OF_CAUGHT,
    ),
    Mutant(
        name="a tensor that the function makes itself is not known for one",
        file=TYPES,
        old="            self._note(target.id, self.kind(value))",
        new="            pass",
        test=OF_CAUGHT,
    ),
    Mutant(
        name="the truth of a tensor may be asked for outside of conditions",
        file=SCAN,
        old="            return node.values[:-1]",
        new="            return []",
        test=OF_CAUGHT,
    ),
    Mutant(
        name="a condition of several parts is not looked into",
        file=TYPES,
        old="                parts = node.values\n",
        new="                parts = []\n",
        test=OF_CAUGHT,
    ),
    Mutant(
        name="what torch tells the host counts as a tensor",
        file=TYPES,
        old='or _HOST_MODULES & set(ast.unparse(function).split("."))',
        new="",
        test=OF_HARMLESS,
    ),
    Mutant(
        name="a comparison with None counts as a tensor",
        file=TYPES,
        old="ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops",
        new="ast.In | ast.NotIn) for op in node.ops",
        test=OF_HARMLESS,
    ),
    Mutant(
        name="fields of dataclasses are not known for tensors",
        file=TYPES,
        old="facts.classes[each.name].update(_fields(each, facts))",
        new="pass",
        test="tests/unit/test_graph_planted.py::test_what_is_planted_is_found",
    ),
    Mutant(
        name="kernels are read like host code",
        file=SCAN,
        old="and not any(map(_is_jit, node.decorator_list))",
        new="",
        test=OF_SCAN + "test_findings_name_the_innermost_function_and_kernels_are_left_out",
    ),
    Mutant(
        name="an exception covers all of its file",
        file=SCAN,
        old="fnmatchcase(finding.function, self.function)",
        new="True",
        test=OF_EXCEPTION,
    ),
    Mutant(
        name="an exception that covers nothing stays",
        file=SCAN,
        old="if not any(map(each.covers, excused))]",
        new="if False]",
        test=OF_EXCEPTION,
    ),
    Mutant(
        name="steps that could not be run are no reason to worry",
        file=DOCTOR,
        old="found.violations or found.idle or is_broken or has_problems",
        new="found.violations or found.idle or has_problems",
        test=OF_DOCTOR,
    ),
    Mutant(
        name="problems of a step are no reason to worry",
        file=DOCTOR,
        old="found.violations or found.idle or is_broken or has_problems",
        new="found.violations or found.idle or is_broken",
        test=OF_DOCTOR,
    ),
    Mutant(
        name="brackets in a problem are markup",
        file=DOCTOR,
        old='Text("; ".join(check.problems))',
        new='"; ".join(check.problems)',
        test="tests/unit/commands/test_doctor_graphs.py::test_a_problem_is_shown_to_the_letter",
    ),
    Mutant(
        name="not a number is no difference",
        file=READINESS,
        old="if not difference <= MAX_DIFFERENCE:",
        new="if difference > MAX_DIFFERENCE:",
        test=OF_READINESS + "test_values_that_differ_are_told",
    ),
    Mutant(
        name="what drafts is not compared with eager drafting",
        file=READINESS,
        old="        if self._draft_layers:  # of",
        new="        if False:  # of",
        test=OF_DRAFTS,
    ),
    Mutant(
        name="steps are checked without anything behind them",
        file=READINESS,
        old="            num_propose=self._num_propose,\n",
        new="",
        test=OF_DRAFTS,
    ),
    Mutant(
        name="memory that a comparison takes is the step's",
        file=READINESS,
        old="        if self._has_graphs and kind in WHOLE and not self._drafts_eagerly:\n",
        new="        allocations = float(_num_grabbed(self._rows.device) - grabbed)\n"
        "        if self._has_graphs and kind in WHOLE and not self._drafts_eagerly:\n",
        test=OF_READINESS + "test_memory_that_the_comparison_takes_is_not_the_step_s",
    ),
    Mutant(
        name="what a check says while it runs is kept back",
        file=DOCTOR,
        old='        sys.stderr.write(said + "\\n")\n',
        new="",
        test="tests/unit/commands/test_doctor_graphs.py::test_what_the_other_process_says_is_passed_on_at_once",
    ),
    Mutant(
        name="a step that should be replayed may run eagerly",
        file=READINESS,
        old="if ran != wanted:",
        new="if False:",
        test=OF_READINESS + "test_a_step_that_ran_otherwise_than_it_should_is_told",
    ),
    Mutant(
        name="a step at fault is ready",
        file=READINESS,
        old="if result.faults.size or (result.counts < 1).any():",
        new="if False:",
        test=OF_READINESS + "test_a_step_that_waits_for_the_device_or_faults_is_told",
    ),
    Mutant(
        name="verdicts count again from nothing at each look",
        file=METRICS,
        old="inc(max(0, count - old))",
        new="inc(count)",
        test="tests/unit/server/test_metrics.py::test_verdicts_of_the_gate_are_counted_by_reason_and_never_fall",
    ),
    Mutant(
        name="the next step's tokens are there before the drafts that are written over them",
        file=READINESS,
        old="        self._await_drafts()  # or they would be written over the tokens\n",
        new="",
        test=OF_LATE,
    ),
    Mutant(
        name="what drafts behind a step is compared before it has ended",
        file=READINESS,
        old="        self._await_drafts()\n        eager._await_drafts()\n",
        new="",
        test=OF_LATE,
    ),
]

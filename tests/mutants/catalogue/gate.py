"""The gate of steps: loads, coverage, reasons."""

from hiserve.runners import gate
from tests.unit.runners import test_gate, test_gate_oracle

with gate.admit, test_gate.test_a_step_runs_exactly_when_all_it_reads_is_there_or_on_its_way:
    "INV 29: a step runs although a load that it reads has failed"
    any(op in loads.failed for op in plan.waits)
    False
with gate.admit, test_gate_oracle.test_precise_replays_whatever_is_ordered_and_nothing_else:
    "INV 29: a replay does not wait for the loads that it reads"
    Decision(Action.REPLAY, reason, waits, full, step.sampling)
    Decision(Action.REPLAY, reason, (), full, step.sampling)
with gate._refusal, test_gate_oracle.test_strict_refuses_replay_exactly_while_any_load_is_under_way:
    "INV 29: a strict gate replays during loads of other rows"
    coverage.is_strict and bool(loads.open)
    False
with gate._refusal, test_gate_oracle.test_precise_replays_whatever_is_ordered_and_nothing_else:
    "INV 29: a precise gate refuses replays during loads of other rows"
    coverage.is_strict and bool(loads.open)
    bool(loads.open)
with gate._full, test_gate.test_a_step_is_replayed_exactly_when_every_limit_of_some_graph_holds:
    "INV 29: a graph whose capture failed is replayed"
    bucket in graphs.failed
    False
with gate._refusal, test_gate.test_a_step_that_may_not_be_replayed_runs_eagerly:
    "INV 47: the graph of a step that ran out of memory is replayed"
    not plan.may_replay
    False
with gate.DecisionLog.last, test_gate.test_the_log_counts_all_decisions_and_tells_the_latest_ones:
    "a report tells an earlier step's decision"
    self._latest[-1]
    self._latest[0]

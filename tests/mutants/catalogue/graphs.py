"""Guards of graphs: what pads a batch, what may be old, what could not be captured."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GRAPH = "hiserve/runners/graph.py"
PIECES = "hiserve/runners/piecewise.py"
MIXED = "hiserve/runners/mixed.py"
GATE = "hiserve/runners/gate.py"
INPUTS = "hiserve/runners/inputs.py"
OF_GRAPHS = "tests/unit/runners/test_graph.py::"
OF_PADDING = OF_GRAPHS + "test_padding_rows_write_only_the_sink"
OF_GARBAGE = OF_GRAPHS + "test_replays_over_garbage_give_the_tokens_of_eager_steps"
OF_MIXED = OF_GRAPHS + "test_mixed_steps_over_garbage_give_the_tokens_of_eager_steps"
OF_PLACES = "tests/unit/runners/test_gate.py::test_mixed_steps_are_one_graph_as_far_as_it_has_places"
OF_PIECES = OF_GRAPHS + "test_pieces_over_garbage_give_the_tokens_of_eager_steps"

MUTANTS = [
    Mutant(
        name="a graph is launched while another device is current",
        file="hiserve/runners/capture.py",
        old="        with torch.cuda.device(self._device):\n            self._graph.replay()\n",
        new="        self._graph.replay()\n",
        test="tests/unit/runners/test_capture.py::test_a_graph_is_launched_while_its_own_device_is_current",
    ),
    Mutant(
        name="rows that pad a batch are a row that runs",
        file=GRAPH,
        old="host[0, :num_rows], host[0, num_rows:] = plan.rows, 0",
        new="host[0, :num_rows], host[0, num_rows:] = plan.rows, plan.rows[0]",
        test=OF_PADDING,
    ),
    Mutant(
        name="what the rows before left pads a batch",
        file=GRAPH,
        old="host[0, :num_rows], host[0, num_rows:] = plan.rows, 0",
        new="host[0], host[0, :num_rows] = captured.varying[0], plan.rows",
        test=OF_GARBAGE,
    ),
    Mutant(
        name="rows that pad a batch draw tokens too",
        file=GRAPH,
        old="finish_step(plan, _of_plan(captured.inputs, plan), logits, self._rows)",
        new="finish_step(plan, captured.inputs, captured.logits, self._rows)",
        test=OF_GARBAGE,
    ),
    Mutant(
        name="draws behind a graph look through rows of any length",
        file=GRAPH,
        old=", max_kv_len=int(plan.max_len.max())),",
        new="),",
        test=OF_GRAPHS + "test_draws_behind_a_graph_read_no_more_tokens_than_the_rows_have",
    ),
    Mutant(
        name="a graph does not draw",
        file=GRAPH,
        old="            graph.replay()\n            outcome =",
        new="            outcome =",
        test=OF_GARBAGE,
    ),
    Mutant(
        name="a capture that failed is forgotten",
        file=GRAPH,
        old="                    self.failed.add(num_rows)\n",
        new="                    self._captured.pop(num_rows, None)\n",
        test=OF_GRAPHS + "test_a_capture_that_fails_is_told_once_and_its_steps_run_eagerly",
    ),
    Mutant(
        name="nobody compares a replay with the eager step",
        file=GRAPH,
        old="    if not torch.equal(made, expected):",
        new="    if expected is None:",
        test=OF_GRAPHS + "test_a_replay_that_differs_from_the_eager_step_is_not_used",
    ),
    Mutant(
        name="nobody compares what a replay draws with the eager step",
        file=GRAPH,
        old="            _check_replay(graph, drawn, words[drawing])\n",
        new="            pass\n",
        test=OF_GRAPHS + "test_a_replay_that_draws_otherwise_than_the_eager_step_is_not_used",
    ),
    Mutant(
        name="tokens that pad pieces are written where others were",
        file=INPUTS,
        old="    static.slots[num_tokens:size].zero_()\n",
        new="",
        test=OF_PIECES,
    ),
    Mutant(
        name="pieces keep the positions of the step before",
        file=INPUTS,
        old="    static.positions[:num_tokens].copy_(inputs.positions)\n",
        new="",
        test=OF_PIECES,
    ),
    Mutant(
        name="pieces whose capture failed are forgotten",
        file=PIECES,
        old="self.failed = set(self._buckets) - self._captured.keys()",
        new="self.failed = set()",
        test=OF_GRAPHS + "test_pieces_that_cannot_be_captured_run_eagerly",
    ),
    Mutant(
        name="captures of pieces draw numbers of torch's own",
        file=PIECES,
        old="bridge.out.normal_(generator=self._noise)",
        new="bridge.out.normal_()",
        test=OF_GRAPHS + "test_captures_draw_no_numbers_of_torch_s_own",
    ),
    Mutant(
        name="garbage is collected while graphs are captured",
        file="hiserve/runners/capture.py",
        old="    gc.disable()\n",
        new="    gc.enable()\n",
        test=OF_GRAPHS + "test_garbage_is_left_alone_while_graphs_are_captured",
    ),
    Mutant(
        name="a closed executor keeps its graphs",
        file="hiserve/worker/executor.py",
        old="        self._runners.close()\n",
        new="",
        test=OF_GRAPHS + "test_an_executor_that_is_closed_holds_no_graphs",
    ),
    Mutant(
        name="pieces that were captured last outlive the executor",
        file=PIECES,
        old="        self._bridge.pieces.clear()  # of the bucket that was captured last\n",
        new="",
        test=OF_GRAPHS + "test_an_executor_that_is_closed_holds_no_graphs",
    ),
    Mutant(
        name="padding of a mixed step is written where the step before wrote",
        file=INPUTS,
        old="    static.slots[num_tokens:size].zero_()\n",
        new="",
        test=OF_MIXED,
    ),
    Mutant(
        name="places that a mixed step leaves empty have the lengths of others",
        file=MIXED,
        old="        static.kv_lens.fill_(1)\n",
        new="",
        test=OF_MIXED,
    ),
    Mutant(
        name="prompts of a mixed step begin where empty places of rows that decode end",
        file=MIXED,
        old="indptr[num_decode + 1 : first + 1] = ends[num_decode - 1] if num_decode else 0",
        new="indptr[num_decode + 1 : first + 1] = first",
        test=OF_MIXED,
    ),
    Mutant(
        name="a mixed step may have rows of any width that decode",
        file=GATE,
        old=" or step.decode_width > graphs.max_width:",
        new=":",
        test=OF_PLACES,
    ),
    Mutant(
        name="a mixed step may have any number of prompts",
        file=GATE,
        old="step.num_rows - step.num_decode > graphs.max_prompts or ",
        new="",
        test=OF_PLACES,
    ),
    Mutant(
        name="a graph waits for the layers of a load",
        file=GATE,
        old="    mixed = 0 if waits else _mixed(",
        new="    mixed = _mixed(",
        test="tests/unit/runners/test_gate.py::test_mixed_steps_whose_capture_failed_or_that_wait_for_layers_go_to_pieces",
    ),
    Mutant(
        name="logits are computed of any number of tokens",
        file="hiserve/runners/tail.py",
        old="        if more:\n",
        new="        if False:\n",
        test="tests/unit/runners/test_tail.py",
    ),
    Mutant(
        name="rows verify all drafts that a changed choice left them",
        file="hiserve/worker/draft_choice.py",
        old="            return np.full_like(drafted, least)\n",
        new="            return drafted\n",
        test="tests/unit/worker/test_draft_choice.py::test_rows_that_a_choice_left_with_different_drafts_verify_the_least_of_them",
    ),
    Mutant(
        name="requests that want different numbers of drafts verify the least of them",
        file="hiserve/worker/draft_choice.py",
        old="(most == most[0]).all() and (least",
        new="(least",
        test="tests/unit/worker/test_draft_choice.py::test_rows_that_a_choice_left_with_different_drafts_verify_the_least_of_them",
    ),
]

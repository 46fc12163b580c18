"""Guards of built-in shapes, of what copies pages on a device, and of forwards that wait layer by layer."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SHAPES = "hiserve/models/shapes.py"
DISPATCH = "hiserve/runners/dispatch.py"
OF_SHAPES = "tests/unit/models/test_shapes.py::"
QUEUE = "hiserve/cache/pools/transfer_queue.py"
OF_EAGER = "tests/unit/runners/test_eager.py::"
OF_QUEUE = "tests/unit/pools/test_transfer_queue.py::"

MUTANTS = [
    Mutant(
        name="a graph of a whole step does not wait for the loads that it reads",
        file="hiserve/runners/dispatch.py",
        old="                wait(None)\n            return self._full",
        new="                pass\n            return self._full",
        test="tests/e2e/test_recorded_loads.py::test_a_step_waits_for_the_loads_that_it_reads",
    ),
    Mutant(
        name="the next replay overwrites a result that nobody has read yet",
        file="hiserve/worker/executor.py",
        old="outcome.words.numpy().copy()",
        new="outcome.words.numpy()",
        test="tests/unit/runners/test_graph.py::test_results_stay_what_they_were_when_the_graph_is_replayed_again",
    ),
    Mutant(
        name="a shape without weights is read from a checkpoint",
        file=SHAPES,
        old='if settings.shape is not None and settings.load_format != "dummy":',
        new="if False:",
        test=OF_SHAPES + "test_a_shape_is_refused_where_weights_are_to_be_read",
    ),
    Mutant(
        name="a tokenizer may have tokens that the shape does not",
        file=SHAPES,
        old="if model.vocab_size > shape.vocab_size:",
        new="if False:",
        test=OF_SHAPES + "test_a_tokenizer_with_more_tokens_than_the_shape_is_refused",
    ),
    Mutant(
        name="a shape has no end tokens",
        file=SHAPES,
        old='        "eos_token_ids": model.eos_token_ids,\n',
        new="",
        test=OF_SHAPES + "test_the_folder_gives_end_tokens_and_sampling_and_nothing_else",
    ),
    Mutant(
        name="parameters are made on the host",
        file="hiserve/models/weights.py",
        old="torch.empty(shape, dtype=dtype, device=device)",
        new="torch.empty(0, dtype=dtype).expand(0)",
        test=OF_SHAPES + "test_the_parameters_of_a_shape_are_made_on_the_device_that_is_named",
    ),
    Mutant(
        name="caches of two shapes meet",
        file="hiserve/models/identity.py",
        old="namespace_digest(secret, shape, ",
        new="namespace_digest(secret, ",
        test=OF_SHAPES + "test_caches_of_two_shapes_never_meet",
    ),
    Mutant(
        name="staging memory is not planned for",
        file="hiserve/core/resolve.py",
        old='items["staging of host pages"] = max(STAGING_BYTES, 4 * page)',
        new="pass",
        test="tests/unit/core/test_resolve.py::"
        "test_on_cuda_the_host_cache_lies_beside_the_device_and_its_pages_pass_through_the_device",
    ),
    Mutant(
        name="a layer reads before its part of a load is there",
        file="hiserve/models/decoder.py",
        old="                inputs.before_layer(index)\n",
        new="                pass\n",
        test=OF_EAGER + "test_what_is_on_its_way_to_a_layer_may_arrive_right_before_it",
    ),
    Mutant(
        name="a forward does not wait for its loads",
        file=DISPATCH,
        old="forward = replace(forward, before_layer=wait)",
        new="pass",
        test=OF_EAGER + "test_a_step_waits_layer_by_layer_for_the_loads_that_it_reads_and_for_no_others",
    ),
    Mutant(
        name="every layer waits for the whole of a load",
        file="hiserve/worker/copier.py",
        old="self._transfers.wait(op, layer)",
        new="self._transfers.wait(op)",
        test=OF_EAGER + "test_a_step_waits_layer_by_layer_for_the_loads_that_it_reads_and_for_no_others",
    ),
    Mutant(
        name="a load that failed is waited for",
        file="hiserve/cache/pools/transfer.py",
        old="            if copy.kind is CopyKind.LOAD:\n                self._queue.release(copy)",
        new="            if copy.kind is CopyKind.LOAD and not reason:\n                self._queue.release(copy)",
        test="tests/contract/test_transfers.py::"
        "test_a_copy_that_fails_is_answered_with_its_reason_and_nobody_waits_for_it[thread]",
        timeout_s=30.0,
    ),
    Mutant(
        name="stores begin while a step is launched",
        file=QUEUE,
        old="        if self._is_launching:\n            with self._news:\n                self._news.wait_for",
        new="        if False:\n            with self._news:\n                self._news.wait_for",
        test=OF_QUEUE + "test_launches_that_never_end_cost_each_piece_a_moment",
    ),
    Mutant(
        name="a load waits for a store that waits for a launch",
        file=QUEUE,
        old=" or self._may_begin(CopyKind.LOAD)\n",
        new="\n",
        test=OF_QUEUE + "test_a_piece_of_a_store_waits_until_the_launch_is_over_or_the_queue_closed_or_a_load_there",
    ),
    Mutant(
        name="a launch that fails leaves stores waiting",
        file="hiserve/worker/copier.py",
        old="            self._transfers.launch_ends()\n",
        new="            pass\n",
        test="tests/unit/worker/test_executor_faults.py::"
        "test_stores_give_way_while_a_step_is_launched_and_no_longer_also_when_it_fails",
    ),
    Mutant(
        name="stores may lock all of a device pool",
        file="hiserve/worker/transfers.py",
        old="share = pool.num_bytes // _QUEUED_SHARE",
        new="share = pool.num_bytes",
        test="tests/unit/worker/test_transfers.py::"
        "test_stores_that_wait_lock_an_eighth_of_the_device_pool_or_what_a_long_order_takes",
    ),
    Mutant(
        name="staging memory is filled again before it was emptied",
        file="hiserve/cache/pools/page_streams.py",
        old="        self._kernels.wait_event(crossed)\n",
        new="",
        test="tests/unit/pools/test_page_streams.py::test_every_byte_arrives_whichever_stream_runs_first",
    ),
]

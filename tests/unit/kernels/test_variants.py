"""Kernels are not compiled anew, while requests wait, for where the tensors of a step begin."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "kernel", "views"),
    [
        ("attention_schedule", "_schedule", ("qo_indptr", "kv_lens")),
        ("attention_extend", "_extend", ("qo_indptr", "kv_lens", "page_table", "tree_mask")),
        ("attention_extend", "_join", ("qo_indptr",)),
        ("latent_decode", "_attend", ("qo_indptr", "kv_lens", "page_table", "num_tokens")),
        ("latent_decode", "_join", ("qo_indptr", "kv_lens", "num_tokens", "num_parts")),
        ("page_lists", "_list_pages", ("page_table", "kv_lens", "rows", "indptr")),
        ("page_copy", "_copy_pages", ("indices",)),
        ("step_inputs", "_check_rows", ("rows", "num_new", "num_draft", "samples", "max_len")),
        ("step_inputs", "_place_tokens", ("token_rows", "offsets", "rows", "num_new", "num_draft")),
        ("step_triton", "_walk_rows", ("sampling_rows", "num_draft")),
        ("step_triton", "_count_accepted", ("sampling_rows", "num_draft")),
        ("step_triton", "_advance_rows", ("rows", "num_draft", "sampling")),
        (
            "draft_triton",
            "_draft_inputs",
            ("rows", "first", "num", "legal", "token_rows", "offsets", "kv_lens", "table"),
        ),
        (
            "draft_triton",
            "_draft_hidden_states",
            ("rows", "first", "token_rows", "offsets", "legal", "qo_indptr", "table"),
        ),
        (
            "draft_triton",
            "_keep_hidden_states",
            ("rows", "first", "token_rows", "offsets", "legal", "qo_indptr", "table"),
        ),
        ("draft_triton", "_draft_ngrams", ("rows", "continuations")),
        ("delta_inputs", "_make_inputs", ("rows", "starts", "state_lens", "indptr", "num_tokens", "room")),
        (
            "delta_chunks",
            "_solve_chunks",
            ("starts", "state_lens", "state_ends", "snap_at", "snap_slots", "indptr", "num_tokens", "room"),
        ),
        *(
            (
                module,
                kernel,
                ("rows", "starts", "state_lens", "state_ends", "snap_at", "snap_slots", "indptr", "num_tokens", "room"),
            )
            for module, kernel in (("delta_step", "_advance"), ("delta_scan", "_scan_chunks"))
        ),
    ],
)
def test_views_of_an_upload_or_of_a_batch_may_begin_anywhere(module: str, kernel: str, views: tuple[str, ...]) -> None:
    """Otherwise there would be a variant for each of them that is 16-byte aligned by chance."""
    compiled = getattr(importlib.import_module(f"hiserve.kernels.{module}"), kernel)
    parameters = {each.name: each for each in compiled.params}
    for view in views:
        asked = parameters[view]
        assert asked.do_not_specialize or asked.do_not_specialize_on_alignment, view

"""Reported failures of hybrid caches (HB): layers with windows, latent attention, draft heads beside them."""

from hiserve.cache.index import prefixes, tails
from hiserve.cache.storage import transfer
from hiserve.core import memory_plan, window_pool
from hiserve.engine import row_tails, rows
from hiserve.kernels import step_reference
from hiserve.models import draft_config
from hiserve.runners import gate
from hiserve.spec import head
from tests.e2e import test_hybrid_reports_drafts, test_hybrid_reports_hits
from tests.unit.core import test_hybrid_reports_sizes
from tests.unit.kernels import test_hybrid_reports_rows

with row_tails.RowWindows.admit, test_hybrid_reports_hits.test_hb_01_a_hit_reads_its_window_from_the_cache_and_from_no_row:
    "HB-01: a hit has window pages of its own, which nobody has filled"
    self._pool.hold(pages)
    pages = self._pool.allocate(np.zeros(pages.size, dtype=np.int32))
with row_tails.RowTails.admit, test_hybrid_reports_hits.test_hb_02_a_prompt_of_one_page_and_a_token_is_a_hit_in_every_family["gpt_oss"]:
    "HB-02: resume points are aligned to more than a page"
    (num_known - 1) // page_size * page_size
    (num_known - 1) // (4 * page_size) * (4 * page_size)
with prefixes.Prefixes.usable, test_hybrid_reports_drafts.test_hb_03_a_head_takes_no_page_from_a_repeated_prompt["latents"]:
    "HB-03: a match leaves out its last page"
    len(key) // 4 - 1
    len(key) // 4 - 1 - self._page_size
with rows.RowState.publish, test_hybrid_reports_drafts.test_hb_04_a_head_takes_no_page_from_the_next_turn["windows"]:
    "HB-04: rows with drafts keep their last page back"
    full = np.minimum(self.settled[rows], self.known[rows]) // page_size
    full = np.minimum(self.settled[rows], self.known[rows]) // page_size - min(1, self._num_ahead)
with memory_plan._Worker._page_items, test_hybrid_reports_sizes.test_hb_05_pages_stay_as_long_as_they_are_whatever_other_layers_store[16]:
    "HB-05: pages of history have room for the layers with a window"
    rows.token - self.windows.slot_bytes
    rows.token
with row_tails.RowTails.admit, test_hybrid_reports_hits.test_hb_06_a_chat_keeps_the_boundaries_that_can_come_back_and_no_others:
    "HB-06: every page of a prompt gets a tail"
    range(every, prompt_end, every) if every else ()
    range(page_size, prompt_end, page_size)
with tails.TailTiers.keep, test_hybrid_reports_hits.test_hb_07_a_long_chat_keeps_its_front_and_its_last_turn_when_tails_are_short:
    "HB-07: the newest tail goes first"
    self.touch(tail, self._tiers.clock)
    self.touch(tail, -self._tiers.clock)
with row_tails.RowWindows.leave, test_hybrid_reports_hits.test_hb_08_the_passing_window_of_a_long_prompt_flushes_no_cached_prefix:
    "HB-08: pages behind a window stay in use"
    self._pool.drop(self.tables.pages[row, self.first[row] : first])
    pass
with row_tails.RowTails.release, test_hybrid_reports_hits.test_hb_09_a_prompt_that_diverges_within_the_last_page_resumes_before_it[1]:
    "HB-09: the tail at the end of a prompt goes with its row"
    self._tails.touch(tail, 0)
    tail.close()
with draft_config.DraftConfig.kv_groups, test_hybrid_reports_sizes.test_hb_10_a_draft_head_takes_one_layer_of_the_cache:
    "HB-10: a draft head takes many layers of the cache"
    rename(group, "draft")
    msgspec.structs.replace(rename(group, "draft"), num_layers=8)
with step_reference.fill_inputs[2], test_hybrid_reports_rows.test_hb_12_what_pads_a_step_writes_the_padding_page_of_every_space:
    "HB-12: rows that may not run write window pages of others"
    torch.where(legal[:, None], table, PADDING_PAGE)
    table
with step_reference._write_tokens, test_hybrid_reports_rows.test_hb_13_a_discarded_step_of_a_row_leaves_everything_before_it:
    "HB-13: a step that accepts nothing writes before its first place"
    torch.where(is_emitted, places, 0)
    torch.where(is_emitted, places, places - 1)
with gate.StepFacts.of, test_hybrid_reports_drafts.test_hb_14_a_prompt_as_long_as_a_token_and_its_drafts_is_no_verify_step["windows"]:
    "HB-14: a short prompt is taken for a verify step"
    (plan.num_draft == width - 1).all()
    True
with step_reference.fill_inputs, test_hybrid_reports_drafts.test_hb_15_a_verify_graph_serves_every_length["windows"]:
    "HB-15: a graph keeps the window tables of its capture"
    forward.window_table.copy_(torch.where(is_seen, table, forward.window_table))
    pass
with step_reference.advance, test_hybrid_reports_drafts.test_hb_16_the_token_after_a_rejection_is_right_with_graphs["windows-0"]:
    "HB-16: a row goes on behind the drafts that were refused"
    (kv_lens - num_refused) * legal
    kv_lens * legal
with transfer.ThreadTransfers._execute, test_hybrid_reports_drafts.test_hb_17_drafts_and_a_host_tier_together_change_nothing["latents"]:
    "HB-17: beside a draft head, the model's part of a page stays on the device"
    host.layout.groups if copy.device_pages.size else ()
    host.layout.groups[1:]
with (
    head.HeadProposer.draft,
    test_hybrid_reports_drafts.test_hb_18_drafts_are_drawn_with_the_noise_of_their_places_at_any_temperature["gpt_oss"],
):
    "HB-18: drafts are greedy at temperature 1"
    is_greedy
    True
with (
    row_tails.RowTails._keep,
    test_hybrid_reports_hits.test_hb_20_a_warm_prefix_gives_the_tokens_of_a_cold_one_at_every_boundary_that_was_kept[12],
):
    "HB-20: a tail is kept at the boundary before its own"
    num_published - num_tokens // self._page_size
    num_published - num_tokens // self._page_size + 1
with (
    row_tails.RowWindows.leave,
    test_hybrid_reports_hits.test_hb_21_a_prompt_far_longer_than_the_window_pages_runs_in_them_and_evicts_nothing,
):
    "HB-21: a row keeps all its window pages while it runs"
    self._first_of(num_tokens)
    0
with window_pool.WindowPool.tail_share, test_hybrid_reports_sizes.test_hb_22_the_share_of_windows_follows_the_model:
    "HB-22: half of the memory is for windows"
    min(MOST_SHARE, max(LEAST_SHARE, tail / (tail + TAIL_TOKENS * history)))
    1 / 2

"""Guards of attention: what tokens see, how parts join, which backend may be asked for what."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CPU = "hiserve/attention/cpu.py"
REFERENCE = "hiserve/attention/reference.py"
BACKENDS = "hiserve/attention/backends.py"
KERNELS = "hiserve/kernels/reference.py"
CONTRACT = "tests/contract/test_attention.py::"
OF_BACKENDS = "tests/unit/attention/test_backends.py::"
OF_LISTS = "tests/unit/kernels/test_page_lists.py::"

MUTANTS = [
    Mutant(
        name="a chunk's causal mask ignores its prefix",
        file=CPU,
        old="hidden.triu(before + 1)",
        new="hidden.triu(1)",
        test=CONTRACT + "test_equals_the_oracle_whatever_the_rows_are",
    ),
    Mutant(
        name="the CPU's fast path takes a tree for a chain",
        file=CPU,
        old='        assert inputs.tree_mask is None, "the CPU backend has no tree masks"\n',
        new="",
        test="tests/unit/attention/test_cpu.py::test_a_tree_is_refused",
    ),
    Mutant(
        name="values of slots nobody may see are read",
        file=REFERENCE,
        old=".masked_fill_(hidden.all(1)[:, :, None, None], 0)",
        new="",
        test=CONTRACT + "test_equals_the_oracle_on_ragged_batches",
    ),
    Mutant(
        name="a window is one token too long",
        file=REFERENCE,
        old="self._keys <= self._positions[:, :, None] - window",
        new="self._keys < self._positions[:, :, None] - window",
        test=CONTRACT + "test_a_window_hides_what_is_behind_it_in_its_layers_only",
    ),
    Mutant(
        name="every layer has the first one's window",
        file=REFERENCE,
        old="(window := self._shape.window(layer))",
        new="(window := self._shape.window(0))",
        test=CONTRACT + "test_a_window_hides_what_is_behind_it_in_its_layers_only",
    ),
    Mutant(
        name="a sink takes no share",
        file=REFERENCE,
        old="            lse = torch.logaddexp(lse, sinks.to(wide).view(kv_heads, -1, 1))\n",
        new="            pass\n",
        test=CONTRACT + "test_sinks_take_their_share_and_give_nothing",
    ),
    Mutant(
        name="a tree's mask hides the prefix",
        file=REFERENCE,
        old="hidden = (new >= 0) & (seen & 1 == 0)",
        new="hidden = seen & 1 == 0",
        test=CONTRACT + "test_a_token_of_a_tree_sees_its_ancestors_and_the_prefix",
    ),
    Mutant(
        name="the first slot is seen though nobody wrote it",
        file=REFERENCE,
        old="            self._hidden |= self._keys == 0\n",
        new="            pass\n",
        test=CONTRACT + "test_nobody_sees_a_hidden_first_slot_even_if_it_holds_nan",
    ),
    Mutant(
        name="a token that sees nothing gives NaN",
        file=REFERENCE,
        old="lse.masked_fill(lse == -torch.inf, 0)[..., None]",
        new="lse[..., None]",
        test=CONTRACT + "test_nobody_sees_a_hidden_first_slot_even_if_it_holds_nan",
    ),
    Mutant(
        name="two parts that saw nothing merge to NaN",
        file=KERNELS,
        old="    finite = lse.masked_fill(lse == -torch.inf, 0)  # -inf less -inf is NaN\n",
        new="    finite = lse\n",
        test=CONTRACT + "test_parts_of_the_keys_merge_to_the_whole",
    ),
    Mutant(
        name="a list of pages holds what stands behind a row's end",
        file=KERNELS,
        old=".masked_fill_(entry * page_size >= kv_lens[row], SINK_PAGE)",
        new="",
        test=OF_LISTS + "test_rows_stand_behind_each_other_and_the_sink_stands_for_what_a_shorter_row_does_not_have",
    ),
    Mutant(
        name="the kernel lists what stands behind a row's end",
        file="hiserve/kernels/page_lists.py",
        old="is_used = is_listed & (entry.to(tl.int64) * PAGE_SIZE < tl.load(kv_lens + row))",
        new="is_used = is_listed",
        test=OF_LISTS + "test_the_kernel_lists_what_its_twin_lists",
    ),
    Mutant(
        name="a backend is opened for what it lacks",
        file=BACKENDS,
        old="        return f\"has no {' and no '.join(lacks)}\" if lacks else None\n",
        new="        return None\n",
        test=OF_BACKENDS + "test_a_refusal_names_the_fact_and_the_backend_that_would_do",
    ),
    Mutant(
        name="triton is opened for more heads than a program holds",
        file=BACKENDS,
        old="        max_group=128,\n",
        new="",
        test=OF_BACKENDS + "test_more_query_heads_than_a_program_holds_are_for_the_reference",
    ),
    Mutant(
        name="sinks that no layer has count as sinks",
        file=BACKENDS,
        old="any(sink is not None for sink in shape.sinks)",
        new="bool(shape.sinks)",
        test=OF_BACKENDS + "test_sinks_that_no_layer_has_refuse_nothing",
    ),
]

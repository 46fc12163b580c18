"""Attention: what a token sees, and which lengths a backend plans with."""

from hiserve.attention import backends, cpu, latent, reference_attention
from hiserve.core import step_memory
from hiserve.engine import build, runner_factory
from tests.contract import test_attention, test_host_lengths
from tests.unit.attention import test_backends, test_latent

with reference_attention.ReferenceAttention.plan, test_attention.test_nobody_sees_a_hidden_first_slot_even_if_it_holds_nan:
    "INV 36: attention reads the first slot although it was never written"
    self._hidden |= self._keys == 0
    pass
with build._depth, test_host_lengths.test_lengths_that_a_backend_plans_with_are_exact:
    "INV 66: a step is planned ahead although attention needs exact host lengths"
    depth and settings.spec.tiers[-1] and runners.needs_host_lengths
    False
with cpu._attend_with_sinks, test_attention.test_sinks_take_their_share_and_give_nothing:
    "INV 36: a sink takes part twice"
    torch.sigmoid(lse - sinks[:, None])
    torch.sigmoid(lse - sinks[:, None]) ** 2
with backends._has_graphs, test_backends.test_graphs_read_lengths_on_the_device_where_there_may_be_drafts_or_flashinfer_does_not_fit:
    "INV 66: graphs of rows that may have drafts are planned with lengths of the host"
    shape.latent is None or has_drafts
    shape.latent is None
with runner_factory.make_runners, test_host_lengths.test_lengths_that_a_backend_plans_with_are_exact:
    "INV 66: attention is opened as if there were no drafts"
    proposer is not None or max(widths) > 1
    False
with latent.most_keys, test_latent.test_a_plan_has_memory_for_the_prefixes_that_are_expanded_at_once:
    "of few heads the rows of prefixes take more than their keys, and than the plan has"
    shape.num_heads * (latent.nope_dim + latent.rope_dim + latent.value_dim) + latent.rank + latent.rope_dim
    shape.num_heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
with step_memory.step_memory, test_latent.test_a_plan_has_memory_for_the_prefixes_that_are_expanded_at_once:
    "the plan has memory for the keys of one row alone"
    max_rows * max_len * key_bytes
    max_len * key_bytes
with latent.LatentAttention.plan, test_latent.test_long_rows_are_one_launch_while_the_keys_of_their_prefixes_fit:
    "the keys of all prefixes are expanded at once, however many they are"
    self._long and num_cached <= most_keys(self._shape) and self._has_launch(inputs.kv_lens.device)
    self._long and self._has_launch(inputs.kv_lens.device)
with latent.LatentAttention._one_launch, test_latent.test_long_rows_are_one_launch_while_the_keys_of_their_prefixes_fit:
    "tokens of an expanded prompt see no key of its prefix"
    torch.nn.functional.pad(inputs.kv_lens[first:].cumsum(0, dtype=torch.int32), (1, 0))
    inputs.qo_indptr[first:] - self._num_absorbed

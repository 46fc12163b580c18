"""Attention: what a token sees, and which lengths a backend plans with."""

from hiserve.attention import cpu, reference_attention
from hiserve.engine import build
from tests.contract import test_attention, test_host_lengths

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

"""Sampling: filters, noise, rows that share a batch."""

from hiserve.sampling import params, sampler
from tests.unit.sampling import test_params, test_reference, test_sampler, test_score_packing

with params.SamplingRows.write, test_params.test_a_row_forgets_its_last_tenant:
    "INV 19: a row keeps the sampling parameters of its last request"
    self._needs[rows] = [_needs(each, ends) for each, ends in zip(params, early_ends, strict=True)]
    self._needs[rows] |= [_needs(each, ends) for each, ends in zip(params, early_ends, strict=True)]
with params._ints, test_sampler.test_seed_choice_and_position_each_change_the_stream:
    "INV 11: all choices of a request draw the same noise"
    admit.choice
    0
with sampler._threshold, test_reference.test_scores_less_their_noise_are_what_the_rules_say:
    "top-k keeps one token too many"
    size - draws.top_k
    size - draws.top_k - 1
with sampler._scaled, test_sampler.test_a_tiny_temperature_is_greedy_in_effect:
    "a tiny temperature divides by zero"
    draws.temperature.to(logits.dtype).clamp_(min=torch.finfo(logits.dtype).tiny)
    draws.temperature.to(logits.dtype)
with sampler.aligned, test_score_packing.test_rows_of_logits_begin_at_multiples_of_16_bytes_when_they_are_summed["333"]:
    "INV 85: the sum of a row's scores depends on its place in the batch"
    -logits.shape[1] % 4
    0

"""Greedy and free draws: the twin against the sampler, Triton against the twin."""

from __future__ import annotations

import pytest
import torch

from hiserve.kernels import step_reference as twins
from hiserve.sampling.sampler import Draws, SamplingBatch, Subset, sample
from tests.helpers.interpreted import run_interpreted
from tests.helpers.sampling import keys, random_logits

PROGRAM = """
import torch
from hiserve.kernels import draw, share_draw, step_reference
from hiserve.kernels.step_ops import FreeDraws, TokenMasks
from tests.helpers.sampling import keys, random_logits, random_masks

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(SEED)
draw._PLAIN_BLOCK, draw._NOISY_BLOCK, draw._MAX_PROGRAMS = 512, 256, 6
for dtype in (torch.float16, torch.float32, torch.float64):
    for num_rows, size in ((0, 300), (1, 5), (2, 1024), (5, 1303)):
        logits = random_logits(generator, num_rows, size, dtype)
        assert torch.equal(draw.greedy(logits), step_reference.greedy(logits)), (dtype, num_rows, size)
        for is_drawn in (None, torch.arange(num_rows) % 2 == 0):
            temperature, seed, choice, position = keys(generator, num_rows)
            ours = draw.draw_free(logits, temperature, seed, choice, position, is_drawn)
            theirs = step_reference.draw_free(logits, temperature, seed, choice, position, is_drawn)
            assert torch.equal(ours, theirs), (dtype, num_rows, size, ours, theirs)

# masks: some rows have one, some share one, some are free; ties and what is not a number count where they are allowed
for dtype in (torch.float16, torch.float32, torch.float64):
    for num_rows, size in ((2, 1024), (5, 1303), (3, 33)):
        logits = random_logits(generator, num_rows, size, dtype)
        logits[0, ::7] = 1e4
        masks = random_masks(generator, num_rows, size)
        best = draw.greedy(logits, masks)
        assert torch.equal(best, step_reference.greedy(logits, masks)), (dtype, num_rows, size)
        keyed = keys(generator, num_rows)
        for is_drawn in (None, torch.arange(num_rows) % 2 == 0):
            ours = draw.draw_free(logits, *keyed, is_drawn, masks)
            assert torch.equal(ours, step_reference.draw_free(logits, *keyed, is_drawn, masks)), (dtype, num_rows, size)
        alone = TokenMasks(masks.entries.clamp(min=0), one_bit := torch.zeros_like(masks.words))
        last = 1 << (size - 1) % 32
        one_bit[:, -1] = last if last < 2**31 else -last  # the last token alone
        assert draw.greedy(logits, alone).tolist() == [size - 1] * num_rows
        assert draw.draw_free(logits, *keyed, None, alone).tolist() == [size - 1] * num_rows

# of equal values the lowest, in whatever lane or part; rows with nothing to choose; what is not a number
ties = torch.full((4, 3000), -1.0)
ties[0, [700, 1100, 2900]] = 2.0
ties[1] = -torch.inf
ties[2, [40, 300]] = torch.inf
ties[3, [2048, 2100]] = torch.nan
temperature, seed, choice, position = keys(generator, 4)
assert draw.greedy(ties).tolist() == step_reference.greedy(ties).tolist() == [700, 0, 40, 2048]
tiny = torch.full_like(temperature, 1e-300)
assert draw.draw_free(ties[:3], tiny[:3], seed, choice, position, None)[0] in (700, 1100, 2900)
assert draw.draw_free(ties[1:2], temperature, seed, choice, position, None).tolist() == [0]

# a view of more logits, rows apart
wide = random_logits(generator, 6, 1200, torch.float32)
assert torch.equal(draw.greedy(wide[1:5, :1000]), step_reference.greedy(wide[1:5, :1000]))

# shares of a vocabulary: the words that ranks exchange are those of the twins, and so are the tokens that they join
for dtype in (torch.float16, torch.float64):
    for num_rows, size, first in ((3, 600, 0), (2, 300, 1344)):
        logits, whole = random_logits(generator, num_rows, size, dtype), random_masks(generator, num_rows + 1, first + size)
        masks = TokenMasks(whole.entries[:num_rows], whole.words.clone())
        masks.words[0] = 0  # a share without an allowed token
        is_drawn = torch.arange(num_rows) % 2 == 0
        for draws in (None, FreeDraws(*keys(generator, num_rows), is_drawn)):
            for given in (None, masks):
                found = [each.best_entries(logits, first, draws, given) for each in (share_draw, step_reference)]
                assert torch.equal(*found), (dtype, num_rows, size, first, found)
                other = found[0].roll(1, 0) + torch.tensor([0, 0, 0, 4096])
                ranks = torch.stack((found[0], other, found[0] - torch.tensor([0, 0, 0, 1])))
                broken = ranks.clone()
                broken[1, -1, 0] = torch.nan  # counts as infinity, as in whole logits
                for each in (ranks, broken):
                    tokens = [ops.join_entries(each, draws) for ops in (share_draw, step_reference)]
                    assert torch.equal(*tokens), (dtype, num_rows, size, first, tokens)
                assert tokens[0][-1] == broken[1, -1, 3]
"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("seed", [7])
def test_a_free_draw_is_the_samplers(dtype: torch.dtype, seed: int) -> None:
    """Mixed with greedy rows, and one drawn at a temperature that vanishes in float32."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(generator, 40, 333, dtype)
    temperature, *key = keys(generator, 40)
    is_drawn = torch.rand(40, generator=generator) < 0.7
    index = is_drawn.nonzero()[:, 0]
    temperature[index[3]] = 1e-300
    draws = Draws(
        Subset(index), temperature[index], torch.zeros_like(index), index.double(), None, *(each[index] for each in key)
    )
    wanted = sample(logits, SamplingBatch(free=draws))
    assert torch.equal(twins.draw_free(logits, temperature, *key, is_drawn), wanted)
    assert torch.equal(
        twins.draw_free(logits[index], temperature[index], *(x[index] for x in key), None), wanted[index]
    )
    assert torch.equal(twins.greedy(logits), sample(logits, SamplingBatch()))
    assert (wanted != twins.greedy(logits)).sum() > 5


@pytest.mark.parametrize("seed", [3])
def test_triton_chooses_the_tokens_that_the_twins_choose(seed: int) -> None:
    print(f"seed {seed}")
    run_interpreted(PROGRAM.replace("SEED", str(seed)))

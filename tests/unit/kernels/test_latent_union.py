"""The kernel of attention over several sources against its twin, run by Triton's interpreter."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

HEADER = """
import torch
from torch.testing import assert_close
from hiserve.kernels import latent_union, union_reference
from hiserve.kernels.latent_union import choose_parts
from hiserve.kernels.union_rows import ChosenRows, RangeRows
from tests.helpers.compressed_cases import Step

torch.set_num_threads(1)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
STEP = Step(cached=(0, 37, 90), new=(2, 1, 3))
NUM_TOKENS, WIDTH, SCALE = 6, 32, 0.3

def sources(dtype, num_chosen=20):
    window, prefix = STEP.paged(WIDTH, 16, 1, 12, dtype), STEP.paged(WIDTH, 2, 4, None, dtype)
    pool = torch.randn(60, WIDTH).to(dtype)
    slots = torch.randint(-1, 60, (NUM_TOKENS, num_chosen))
    slots[3] = -1
    pool[torch.ones(60, dtype=torch.bool).index_fill_(0, slots.clamp(min=0).flatten(), False)] = torch.nan
    return window, prefix, ChosenRows(pool, slots)

def check(q, sources, sink, turns=None):
    expected, found = (each.attend(q, sources, sink, SCALE, turns) for each in (union_reference, latent_union))
    assert found[0].dtype == q.dtype and not found[0].isnan().any()
    assert_close(found, expected, atol=TOLERANCE[q.dtype], rtol=TOLERANCE[q.dtype])
    return found
"""
SOURCES = """
choose = latent_union.choose_parts
for dtype, num_parts, num_heads in ((torch.float32, 1, 3), (torch.float32, 3, 17), (torch.float16, 2, 3)):
    latent_union.choose_parts = lambda *given: (choose(*given)[0], num_parts)
    torch.manual_seed(num_heads)
    window, prefix, some = sources(dtype)
    q, sink = torch.randn(NUM_TOKENS, num_heads, WIDTH).to(dtype), torch.randn(num_heads)
    turns = None if num_heads > 3 else torch.randn(2, NUM_TOKENS, 6).unbind()
    for given in {1: ([window], [some], [some, prefix]), 2: ([window, prefix],), 3: ([window, some],)}[num_parts]:
        check(q, given, sink, turns)
    if num_heads > 3:
        continue  # as one head more than a program has
    nothing = ChosenRows(some.pool[:20], torch.full((NUM_TOKENS, 20), -1))
    for sunk in (sink, None):
        out, lse = check(q, [nothing], sunk)
        assert (out == 0).all() and (lse == -torch.inf).all()
    out, _ = check(q, [prefix, nothing], None)
    assert (out[0] == 0).all()  # the first token of a row sees no compressed row
"""
MERGED = """
# Subsets without the sink, joined with it once, are the union: in any partition, with slots that are there twice.
torch.manual_seed(3)
window, prefix, some = sources(torch.float32)
some.slots[5] = 7
q, sink = torch.randn(NUM_TOKENS, 3, WIDTH), torch.randn(3)
whole = check(q, [window, some], sink)
for sizes in ((20,), (5, 12, 3)):
    parts = [latent_union.attend(q, [ChosenRows(some.pool, each)], None, SCALE) for each in some.slots.split(list(sizes), 1)]
    parts.append(latent_union.attend(q, [window], None, SCALE))
    assert_close(union_reference.merge(parts, sink), whole, atol=2e-6, rtol=2e-6)
# A launch for more: other lengths, as in a graph; and a token does not depend on the others.
for token in (0, 3, 5):
    alone = RangeRows(window.pool, window.table, window.token_rows[token:token + 1], window.positions[token:token + 1], 16, 93, 1, 12)
    one = latent_union.attend(q[token:token + 1], [alone, ChosenRows(some.pool, some.slots[token:token + 1])], sink, SCALE)
    assert_close(one, tuple(each[token:token + 1] for each in whole), atol=2e-6, rtol=2e-6)
"""
PARTS = """
bf16 = torch.bfloat16
def parts(*given, dtype=bf16, num_sms=132):
    tile, num_parts = choose_parts(*given, dtype, num_sms)
    return tile.num_heads, num_parts
assert parts(32, 64, 640) == (64, 4)
assert parts(1, 64, 1152) == (16, 32)
assert parts(4, 64, 640) == (16, 8)
assert parts(8192, 64, 640) == (64, 1)
assert parts(8, 16, 128) == (16, 4)
for num_tokens in (1, 7, 64, 500, 8192):
    for num_heads in (4, 16, 64, 128):
        for num_rows in (1, 128, 640, 32768):
            _, num_parts = choose_parts(num_tokens, num_heads, num_rows, bf16, 132)
            assert num_parts == 1 or num_parts * num_tokens * num_heads <= 320 * 128
"""


def test_one_or_two_sources_of_any_kind_in_any_parts() -> None:
    run_interpreted(HEADER + SOURCES)


def test_subsets_are_joined_with_the_sink_once_and_tokens_do_not_depend_on_others() -> None:
    run_interpreted(HEADER + MERGED)


def test_parts_fill_the_device_within_the_workspace() -> None:
    run_interpreted(HEADER + PARTS)

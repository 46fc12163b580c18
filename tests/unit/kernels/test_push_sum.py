"""Sums by writes into each other's memory, in Triton's interpreter: ranks as processes with shared memory, and words written beforehand."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

HEADER = """
CPU_S = 5
import os, resource, sys, threading, traceback
import torch
from hiserve.kernels import push_sum, reference
from hiserve.kernels.push_sum import MAX_ROWS, MAX_WORDS, Inboxes

torch.set_num_threads(1)
push_sum._POLLS = 4
resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))  # a rank that waits for a word that does not come, also in forks


def shared(size):
    # The memory of each rank, and the view that each has.
    boxes = [torch.zeros((2, size, MAX_ROWS, MAX_WORDS), dtype=torch.int64).share_memory_() for _ in range(size)]
    addresses = torch.tensor([each.data_ptr() for each in boxes])
    zeros = lambda *shape: torch.zeros(shape, dtype=torch.int32)
    return boxes, [Inboxes(addresses, zeros(MAX_ROWS), zeros(1), rank) for rank in range(size)]


def words(x, count):
    # Of each row: the count above 4 bytes of data.
    return (x.view(torch.int32).long() & 0xFFFFFFFF) | (torch.tensor(count) << 32)
"""
RANKS = """
SIZE = 3
EXCHANGES = [(torch.float32, 3, 33), (torch.float32, 1, 70), (torch.float16, 2, 70), (torch.float32, 3, 5)]


def run(rank, views):
    torch.manual_seed(1)
    for dtype, rows, columns in EXCHANGES:
        scale = torch.tensor([1000.0, 1.0, 0.01])[:, None, None]  # the order of sums shows in their bits
        parts = (torch.randn((SIZE, rows, columns)) * scale).to(dtype)
        residual, weight = torch.randn((rows, columns)).to(dtype), torch.rand(columns).to(dtype)
        total = torch.zeros((rows, columns))
        for each in parts:
            total += each.float()
        summed = parts[rank].clone()
        push_sum.push_sum(summed, views[rank])
        assert torch.equal(summed, total.to(dtype)), (dtype, rows, columns)
        expected = residual.clone()
        norm = reference.add_rms_norm(total.to(dtype), expected, weight, 1e-6)
        out = torch.empty_like(residual)
        push_sum.push_add_norm(parts[rank], residual, weight, 1e-6, out, views[rank])
        assert torch.equal(residual, expected), (dtype, rows, columns)
        torch.testing.assert_close(out, norm, rtol=1e-3, atol=1e-3)
    assert views[rank].counts[:4].tolist() == [8, 6, 4, 0]


boxes, views = shared(SIZE)
children = []
for rank in range(SIZE):
    child = os.fork()
    if not child:
        code = 1
        try:
            run(rank, views)
            code = 0
        except Exception:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    children.append(child)
codes = [os.waitpid(child, 0)[1] for child in children]
assert codes == [0] * SIZE, codes
"""
WORDS = """
boxes, views = shared(2)
mine, theirs = torch.randn((2, 2, 8)).half()
view = views[1]
view.counts[:2] = torch.tensor([6, 2**31 - 1])  # a row's own; it may pass the largest number
before, after = [6, 2**31 - 1], [7, -(2**31)]


def arrive(x, counts, rows):
    for row in rows:
        boxes[1][counts[row] & 1, 0, row, :4] = words(x[row : row + 1], counts[row])[0]


# The other rank is one sum ahead in one row, and behind in the other, where a word of two sums before has its place.
later = torch.randn((2, 8)).half()
arrive(theirs, after, [0])
arrive(later, [8, 0], [0])
arrive(later, [0, 2**31 - 2], [1])
late = threading.Timer(0.3, arrive, (theirs, after, [1]))
late.start()
x = mine.clone()
push_sum.push_sum(x, view)
assert torch.equal(x, (mine.float() + theirs.float()).half())
late.join()
assert view.counts[:3].tolist() == [*after, 0]
for row in range(2):
    sent = boxes[0][after[row] & 1, 1, row, :5]
    assert torch.equal(sent[:4], words(mine[row : row + 1], after[row])[0]) and sent[4] == 0
assert not boxes[0][:, 0].any() and not boxes[0][:, :, 2:].any() and not boxes[1][:, 1].any()

x = mine[:1].clone()
push_sum.push_sum(x, view)
assert torch.equal(x, (mine[:1].float() + later[:1].float()).half())

# A sum that waits for a rank that has ended ends as soon as this rank is told.
assert not view.is_ended.any()
threading.Timer(0.3, view.is_ended.fill_, (1,)).start()
push_sum.push_sum(x, view)
assert view.is_ended.all()
"""


def test_ranks_have_the_sums_of_all_in_their_order() -> None:
    run_interpreted(HEADER + RANKS)


def test_words_are_taken_when_they_have_the_count_of_their_row() -> None:
    run_interpreted(HEADER + WORDS)

"""Parts of rows that are joined by whichever program is last: the same bits, in whatever order programs end."""

from __future__ import annotations

import pytest
import torch

from hiserve.core.forward import LayerKV
from hiserve.kernels.attention_decode import decode
from hiserve.kernels.attention_schedule import ScheduledRows, schedule, tile_for

pytestmark = pytest.mark.gpu

LENGTHS = (3000, 5, 1024, 64, 700)


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "num_extra"), [(4, 128, 60), (2, 256, 132)], ids=["at once", "in groups"]
)
def test_layers_and_replays_give_the_same_bits_beside_other_traffic(
    num_kv_heads: int, head_dim: int, num_extra: int
) -> None:
    """Each of many layers counts the parts from zero, and reads no part before it is written, nor that of a layer before."""
    print("seed 0")
    torch.manual_seed(0)
    device, num_heads, num_layers = torch.device("cuda"), 16, 24
    pages = -(-max(LENGTHS) // 16)
    table = torch.randperm(len(LENGTHS) * pages, device=device, dtype=torch.int32).view(len(LENGTHS), pages)
    kv = LayerKV(*torch.randn(2, table.numel() * 16, num_kv_heads, head_dim, device=device).bfloat16())
    indptr = torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device=device)
    rows = ScheduledRows(indptr, torch.tensor(LENGTHS, device=device), table, 1, max(LENGTHS))
    q = torch.randn(num_layers, len(LENGTHS), num_heads, head_dim, device=device).bfloat16()
    q[1::2] = q[1]
    outs = torch.empty_like(q)
    tile = tile_for(head_dim, q.dtype)

    def attend() -> None:
        made = schedule(rows, (num_heads, num_kv_heads), num_extra, tile)
        for layer in range(num_layers):
            decode(q[layer], kv, rows, made, page_size=16, scale=head_dim**-0.5, out=outs[layer])

    stream, side = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    traffic = torch.zeros(2**25, device=device)
    stream.wait_stream(torch.cuda.current_stream())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            attend()
        expected, num_wrong = outs.clone(), torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(100):
            outs.fill_(torch.nan)
            with torch.cuda.stream(side):
                traffic.add_(1)
            graph.replay()
            num_wrong += (outs.view(torch.int16) != expected.view(torch.int16)).sum()
    stream.synchronize()
    side.synchronize()
    assert num_wrong.item() == 0
    assert all(torch.equal(out, expected[1]) for out in expected[1::2])
    assert not torch.equal(expected[0], expected[1])

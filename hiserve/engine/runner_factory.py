"""The runners that a configuration asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from hiserve.attention.backends import open_attention
from hiserve.attention.base import AttentionShape
from hiserve.config.options import Runner
from hiserve.core.drafts import Proposer
from hiserve.core.forward import LayerKV
from hiserve.models.decoder import Decoder
from hiserve.runners.canary import Canary
from hiserve.runners.capture import Capture, mixed_buckets, row_buckets, token_buckets
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.draft_graphs import DraftCapture
from hiserve.runners.eager import EagerRunner, LogitsHead
from hiserve.runners.graph import GraphRunner
from hiserve.runners.mixed import MixedRunner
from hiserve.runners.piecewise import PiecewiseRunner

logger = logging.getLogger(__name__)


def make_runners(
    settings: Runner,
    model: Decoder,
    layers: Sequence[LayerKV],
    rows: DeviceRows,
    shape: AttentionShape,
    *,
    max_batched_tokens: int,
    widths: Sequence[int] = (1,),
    canary: Canary | None = None,
    proposer: Proposer | None = None,
    is_serving: Callable[[], bool] | None = None,
    before_capture: Callable[[Dispatch], object] | None = None,
) -> Dispatch:
    """Opens the attention backend and captures the graphs.

    Args:
        settings: Resolved.
        model: The decoder.
        layers: The pool's views.
        rows: The permanent rows.
        shape: What attention must know of the model.
        max_batched_tokens: Tokens of the largest step.
        widths: Tokens of each row, one of them known and the others drafts, for which whole steps are captured.
        canary: Checks what rows find in pages; it reads them on the host, so that nothing is captured with it.
        proposer: Drafts what follows each step.
        is_serving: As ``open_attention`` takes it.
        before_capture: Called with the runners before anything of them is captured, and if nothing is.

    Raises:
        ConfigError: The backend is not installed or does not support the model.
    """
    attention = open_attention(settings.attention_backend, shape, rows.device, is_serving=is_serving)
    eager = EagerRunner(model, layers, attention)
    if settings.graphs == "off" or canary is not None:
        runners = Dispatch(rows, eager, canary=canary, proposer=proposer)
        if before_capture is not None:
            before_capture(runners)
        return runners
    max_len = rows.max_len if settings.graph_max_len == "auto" else min(rows.max_len, settings.graph_max_len)
    capture = Capture(rows.device)
    buckets = row_buckets(rows.page_table.shape[0] - 1)
    drafts = None if proposer is None else DraftCapture(proposer, capture, max_draft=max(widths) - 1)
    full = {
        width: GraphRunner(
            model, layers, attention, rows, capture, width=width, max_len=max_len, buckets=buckets, drafts=drafts
        )
        for width in widths
    }
    mixed = piecewise = None
    if settings.graphs == "all":
        head = LogitsHead(model, tuple(sorted({num_rows * width for num_rows in buckets for width in widths})))
        if (ragged := attention.ragged()) is not None:
            sizes, most = mixed_buckets(max_batched_tokens), max(widths)
            mixed = MixedRunner(
                model,
                layers,
                ragged,
                shape,
                rows,
                capture,
                buckets=sizes,
                max_width=most,
                max_len=max_len,
                head=head,
            )
        pieces = token_buckets(max_batched_tokens)
        piecewise = PiecewiseRunner(model, layers, attention, shape, capture, buckets=pieces, head=head)
    is_strict = settings.graph_gate == "strict"
    runners = Dispatch(rows, eager, full=full, mixed=mixed, piecewise=piecewise, is_strict=is_strict, proposer=proposer)
    if before_capture is not None:
        before_capture(runners)
    begin, before = time.perf_counter(), torch.cuda.memory_reserved(rows.device)
    runners.capture()
    held = torch.cuda.memory_reserved(rows.device) - before
    seconds = time.perf_counter() - begin
    logger.info("captured %d graph nodes in %.1f s; they hold %.2f GiB", runners.num_nodes, seconds, held / 2**30)
    return runners

"""The runners and the proposer of an engine, by its settings, and their start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from hiserve.attention.backends import open_attention, open_draft_attention
from hiserve.attention.base import Attention, AttentionShape
from hiserve.cache.storage.device import DevicePool
from hiserve.config.options import DTYPE_BYTES, Runner
from hiserve.config.settings import Settings
from hiserve.core.drafts import Proposer
from hiserve.core.forward import LayerKV
from hiserve.core.kv_groups import CANARY
from hiserve.core.step_memory import segment_for, step_memory
from hiserve.engine.executing_half import LoadedHalf
from hiserve.engine.startup import CudaMemoryMeter, compile_steps, profile_steps, warm_up_steps
from hiserve.kernels.draft_ops import draft_ops_for
from hiserve.models.decoder import Decoder, attention_shape
from hiserve.models.draft_config import DraftConfig
from hiserve.models.draft_heads import DraftHead, draft_attention_shape
from hiserve.models.loading import AnyDecoder
from hiserve.models.model_config import ModelConfig
from hiserve.runners.canary import Canary
from hiserve.runners.capture import Capture, mixed_buckets, row_buckets, token_buckets
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.dispatch import Dispatch, EagerRunner
from hiserve.runners.draft_graphs import DraftCapture
from hiserve.runners.graph import GraphRunner
from hiserve.runners.mixed import MixedRunner
from hiserve.runners.piecewise import PiecewiseRunner
from hiserve.runners.step_output import LogitsHead
from hiserve.sampling.logit_shares import DrawOps
from hiserve.spec.head import DraftPool, HeadProposer, TreeProposer
from hiserve.spec.ngram import NgramProposer

logger = logging.getLogger(__name__)

# Makes the proposer of an engine, as ``open_proposer`` does.
MakeProposer = Callable[[Settings, DraftConfig | None, DraftHead | None, DevicePool, DeviceRows], Proposer | None]


def prepare_runners(
    settings: Settings, half: LoadedHalf, proposer: Proposer | None, is_serving: Callable[[], bool] | None
) -> Dispatch:
    """Opens the runners; on CUDA also compiles and warms up their kernels, and measures the largest steps against the budget."""
    model_config, draft, pool, rows = half.config, half.draft, half.pool, half.rows
    dtype, max_tokens = settings.model.dtype, settings.scheduler.max_batched_tokens
    num_draft, has_kernels = settings.spec.tiers[-1], rows.device.type == "cuda"
    exchange = half.model.exchange

    def compile_alone(runners: Dispatch) -> None:
        """Compiles what no earlier start has: ranks of a group may find different kernels in the cache."""
        with nullcontext() if exchange is None else exchange.paused():
            compile_steps(
                runners,
                rows,
                num_threads=settings.runner.cpu_threads,
                max_batched_tokens=max_tokens,
                num_draft=num_draft,
            )

    frees_windows, packs_rows = settings.cache.frees_windows, settings.cache.packs_rows
    plan = model_config.cache_plan(dtype, frees_windows=frees_windows, max_draft=num_draft, packs_rows=packs_rows)
    runners = make_runners(
        settings.runner,
        half.model,
        pool.model_layers(plan),
        rows,
        _shape(settings, half.model, model_config),
        max_batched_tokens=max_tokens,
        widths=settings.spec.widths,
        canary=Canary(rows, pool.layers(CANARY.name)[0]) if settings.cache.kv_canary else None,
        proposer=proposer,
        is_serving=is_serving,
        # A canary reads results of kernels on the host; a dry run has none.
        before_capture=compile_alone if has_kernels and not settings.cache.kv_canary else None,
    )
    if has_kernels:
        warm_up_steps(runners, rows, max_batched_tokens=max_tokens, num_draft=num_draft)
        budget = step_memory(
            model_config.facts().step,
            dtype_bytes=DTYPE_BYTES[dtype],
            max_rows=settings.scheduler.max_running_requests,
            max_tokens=max_tokens,
            max_len=rows.max_len,
            page_size=rows.page_size,
            graphs="off",
            widths=settings.spec.widths,
            draft=None if draft is None else draft.memory_shape(model_config.hidden_size),
            frees_windows=frees_windows,
            is_exact=settings.runner.exact,
        )
        profile_steps(
            runners,
            rows,
            CudaMemoryMeter(rows.device),
            max_batched_tokens=max_tokens,
            num_draft=num_draft,
            budget_bytes=sum(budget.values()),
        )
    return runners


def _shape(settings: Settings, model: AnyDecoder, model_config: ModelConfig) -> AttentionShape:
    return attention_shape(
        model_config,
        dtype=getattr(torch, settings.model.dtype),
        page_size=settings.cache.page_size,
        sinks=model.sinks,
        packs_rows=settings.cache.packs_rows,
        segment=segment_for(settings.model.max_model_len) if settings.runner.exact else None,
    )


def make_runners(
    runner: Runner,
    model: AnyDecoder,
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

    ``widths`` are the tokens of each row, one of them known and the others drafts, for which whole steps are captured. With
    a canary, which checks pages on the host, nothing is captured. ``before_capture`` is called with the runners before
    anything is captured, and if nothing is; ``is_serving`` is that of ``open_attention``.

    Raises:
        ConfigError: The backend is not installed or does not support the model.
    """
    has_drafts = proposer is not None or max(widths) > 1
    attention = open_attention(
        runner.attention_backend,
        shape,
        rows.device,
        has_drafts=has_drafts,
        has_trees=rows.state.trees is not None,
        is_serving=is_serving,
    )
    eager = EagerRunner(model, layers, attention)
    if runner.graphs == "off" or canary is not None:
        runners = Dispatch(rows, eager, canary=canary, proposer=proposer)
        if before_capture is not None:
            before_capture(runners)
        return runners
    max_len = rows.max_len if runner.graph_max_len == "auto" else min(rows.max_len, runner.graph_max_len)
    capture = Capture(rows.device, model.exchange)
    buckets = row_buckets(rows.page_table.shape[0] - 1)
    drafts = None if proposer is None else DraftCapture(proposer, capture, [width - 1 for width in widths])
    full = {
        width: GraphRunner(
            model, layers, attention, rows, capture, width=width, max_len=max_len, buckets=buckets, drafts=drafts
        )
        for width in widths
    }
    mixed = piecewise = head = None
    if runner.graphs == "all":
        head = LogitsHead(model, tuple(sorted({num_rows * width for num_rows in buckets for width in widths})))
        if (ragged := attention.ragged()) is not None:
            sizes = mixed_buckets(max_batched_tokens)
            limits = {"max_width": max(widths), "max_len": max_len}
            mixed = MixedRunner(model, layers, ragged, shape, rows, capture, buckets=sizes, head=head, **limits)
        if isinstance(model, Decoder) and shape.latent is None and rows.states is None:
            pieces, has_windows = token_buckets(max_batched_tokens), rows.windows is not None
            of_model = (model, layers, attention, shape, capture)
            piecewise = PiecewiseRunner(*of_model, buckets=pieces, head=head, has_windows=has_windows)
    is_strict = runner.graph_gate == "strict"
    graphs: dict[str, Any] = {"full": full, "mixed": mixed, "piecewise": piecewise, "head": head}
    runners = Dispatch(rows, eager, **graphs, is_strict=is_strict, proposer=proposer)
    if before_capture is not None:
        before_capture(runners)
    begin, before = time.perf_counter(), torch.cuda.memory_reserved(rows.device)
    runners.capture()
    held, seconds = torch.cuda.memory_reserved(rows.device) - before, time.perf_counter() - begin
    logger.info("captured %d graph nodes in %.1f s; they hold %.2f GiB", runners.num_nodes, seconds, held / 2**30)
    return runners


def open_proposer(
    settings: Settings, draft: DraftConfig | None, head: DraftHead | None, pool: DevicePool, rows: DeviceRows
) -> Proposer | None:
    """Returns the proposer, or None for plain decoding."""
    ops = draft_ops_for(rows.device)
    if draft is None or head is None:
        return NgramProposer(rows.state, ops) if settings.spec.spec == "ngram" else None
    (of_pages,) = pool.layers("boundary")
    boundary, flags = (each.view(rows.num_pages, -1) for each in (of_pages.k, of_pages.v))
    rows.is_drafted = flags[:, 0]
    draw_ops: DrawOps = rows.draw_ops
    if rows.shares is not None and head.is_spread:
        draw_ops = replace(rows.shares, first=0)
    proposer = HeadProposer(
        head,
        DraftPool(
            layers=pool.layers("draft"),
            page_hidden=boundary[:, : head.feature_size],
            is_drafted=rows.is_drafted,
            taken_len=rows.taken_len,
            page_size=settings.cache.page_size,
        ),
        _draft_attention(settings, draft, head.sinks, rows),
        rows.state,
        rows.sampling,
        draw_ops,
        ops,
    )
    if not settings.spec.trees:
        return proposer
    return TreeProposer(proposer, settings.spec.trees, rows.state, rows.sampling, ops)


def _draft_attention(
    settings: Settings, draft: DraftConfig, sinks: tuple[torch.Tensor | None, ...], rows: DeviceRows
) -> Attention:
    dtype = getattr(torch, settings.model.dtype)
    cache = settings.cache
    shape = draft_attention_shape(
        draft, dtype=dtype, page_size=cache.page_size, sinks=sinks, packs_rows=cache.packs_rows
    )
    return open_draft_attention(
        settings.runner.attention_backend, shape, rows.device, has_trees=rows.state.trees is not None
    )

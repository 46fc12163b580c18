"""Loads the decoder of a model, of whichever kind it is."""

from __future__ import annotations

from pathlib import Path

import torch

from hiserve.distributed.exchange import Exchange
from hiserve.distributed.shard import WHOLE
from hiserve.kernels.ops import ops_for
from hiserve.models.decoder import Decoder
from hiserve.models.model_config import ModelConfig
from hiserve.models.shards import local_config
from hiserve.models.stream_decoder import StreamDecoder
from hiserve.models.weights import load_parameters

AnyDecoder = Decoder | StreamDecoder


def load_decoder(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: str,
    device: str,
    load_format: str,
    max_len: int | None = None,
    aux_layers: tuple[int, ...] = (),
    exchange: Exchange | None = None,
    is_exact: bool = False,
) -> AnyDecoder:
    """Reads a checkpoint, or draws random weights of its shape.

    Args:
        folder: Of the checkpoint.
        config: Its shape, the whole model's.
        dtype: Type name of weights and activations, a key of ``config.options.DTYPE_BYTES``.
        device: ``cpu`` or ``cuda``.
        load_format: ``auto`` or ``dummy``.
        max_len: Tokens of the longest request; None is the model's context.
        aux_layers: As for ``Decoder``.
        exchange: Of a rank of a group, which loads its share; None loads all.
        is_exact: Its operations are those whose bits do not depend on the batch.

    Raises:
        ModelError: The checkpoint cannot be used.
    """
    shard = WHOLE if exchange is None else exchange.shard
    parameters = load_parameters(folder, config, getattr(torch, dtype), torch.device(device), load_format, shard)
    max_len = config.context_length if max_len is None else max_len
    ops = ops_for(torch.device(device), is_exact=is_exact)
    kind = Decoder if config.compressed is None else StreamDecoder
    return kind(local_config(config, shard), parameters, max_len, aux_layers, ops, exchange)

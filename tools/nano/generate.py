"""Batched continuations of prompts by the model itself, with a cache of keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.nano.heads import split_heads
from tools.nano.model import Layer, Nano, rotate

CHUNK = 256
# Steps between two looks at whether every row has stopped; a look waits for the device.
LOOK_EVERY = 16


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of a batch, each ``[layers, B, kv_heads, S, head_dim]``, by position."""

    keys: Tensor
    values: Tensor


def empty_cache(target: Nano, batch: int, size: int) -> Cache:
    """A cache for ``batch`` rows of up to ``size`` tokens, in the dtype that the projections give."""
    config, device = target.config, target.embed_tokens.weight.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
    shape = (config.num_layers, batch, config.num_kv_heads, size, config.head_dim)
    return Cache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


def _attended(
    layer: Layer, x: Tensor, places: Tensor, turn: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor]
) -> Tensor:
    """Stores the keys and values of ``x`` and attends to all up to each token's position; ``[B, T, hidden]``."""
    attention, (keys, values) = layer.self_attn, kv
    num_kv_heads, rows = attention.num_kv_heads, torch.arange(len(x), device=x.device)[:, None]
    queries = rotate(split_heads(attention.q_proj(x), attention.num_heads), *turn).to(keys.dtype)
    keys[rows, :, places] = rotate(split_heads(attention.k_proj(x), num_kv_heads), *turn).transpose(1, 2).to(keys.dtype)
    values[rows, :, places] = split_heads(attention.v_proj(x), num_kv_heads).transpose(1, 2).to(values.dtype)
    hidden = torch.arange(keys.shape[2], device=x.device) > places[:, None, None, :, None]
    grouped = queries.reshape(len(x), num_kv_heads, -1, *queries.shape[2:])
    scores = (grouped.flatten(2, 3) @ keys.transpose(-1, -2)).float() * attention.head_dim**-0.5
    weights = scores.view(*grouped.shape[:-1], -1).masked_fill(hidden, float("-inf")).softmax(-1)
    mixed = (weights.flatten(2, 3).to(values.dtype) @ values).view(grouped.shape)
    joined = mixed.flatten(1, 2).transpose(1, 2).flatten(2)
    projected: Tensor = attention.o_proj(joined)
    return projected


def forward(target: Nano, ids: Tensor, places: Tensor, cache: Cache, size: int) -> Tensor:
    """Computes tokens whose predecessors are in the cache.

    Args:
        target: The model.
        ids: int64 ``[B, T]``.
        places: int64 ``[B, T]``. Their positions, all below ``size``.
        cache: Gets their keys and values.
        size: Only the cache's first ``size`` positions are looked at.

    Returns:
        ``[B, T, hidden]``, normed.
    """
    x = target.embed_tokens(ids)
    turn = (target.cos[places][:, None], target.sin[places][:, None])
    for layer, keys, values in zip(target.layers, cache.keys, cache.values, strict=True):
        assert isinstance(layer, Layer)
        kv = (keys[:, :, :size], values[:, :, :size])
        x = x + _attended(layer, layer.input_layernorm(x), places, turn, kv)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    normed: Tensor = target.norm(x)
    return normed


@torch.no_grad()
def continuations(
    target: Nano, prompts: Tensor, lengths: Tensor, num_tokens: int, temperatures: Tensor, stop: int | None = None
) -> Tensor:
    """Continues prompts.

    Args:
        target: The model.
        prompts: int64 ``[B, P]``. Padded on the right with any token.
        lengths: int64 ``[B]``. Tokens of each prompt, at least 1.
        num_tokens: Tokens to add to each row.
        temperatures: float32 ``[B]``. 0 is greedy.
        stop: Ends early once every row has this token among its own; None never ends early.

    Returns:
        int64 ``[B, P + num_tokens]``. Row b holds its prompt, then what the model wrote, then anything.
    """
    batch, longest = prompts.shape
    cache = empty_cache(target, batch, longest + num_tokens)
    states = []
    for first in range(0, longest, CHUNK):
        last = min(first + CHUNK, longest)
        places = torch.arange(first, last, device=prompts.device).expand(batch, -1)
        states.append(forward(target, prompts[:, first:last], places, cache, last))
    rows = torch.arange(batch, device=prompts.device)
    state = torch.cat(states, dim=1)[rows, lengths - 1]
    ids = torch.cat([prompts, prompts.new_zeros(batch, num_tokens)], dim=1)
    stopped = torch.zeros(batch, dtype=torch.bool, device=prompts.device)
    for step in range(num_tokens):
        logits = target.logits(state).float()
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-20, 1 - 1e-7)))
        drawn = (logits + temperatures[:, None] * noise).argmax(-1)
        ids[rows, lengths + step] = drawn
        if stop is not None:
            stopped |= drawn == stop
            if step % LOOK_EVERY == LOOK_EVERY - 1 and bool(stopped.all()):
                break
        state = forward(target, drawn[:, None], (lengths + step)[:, None], cache, longest + step + 1)[:, 0]
    return ids

"""Every kernel in plain torch: vectorised, of fixed shape, without a host sync."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.core.activation import GELU_TANH, SILU, Activation
from hiserve.core.forward import LayerKV
from hiserve.core.row_shapes import PackedPages
from hiserve.kernels.delta import delta as delta
from hiserve.kernels.index_rows import rotate_first as rotate_first
from hiserve.kernels.index_rows import store_index_keys as store_index_keys
from hiserve.kernels.norms import add_rms_norm as add_rms_norm
from hiserve.kernels.norms import gated_rms_norm as gated_rms_norm
from hiserve.kernels.norms import norm_inputs as norm_inputs
from hiserve.kernels.norms import rms_norm as rms_norm
from hiserve.kernels.packed_weights import Weights, plain
from hiserve.kernels.quantized import QuantizedWeight
from hiserve.kernels.quantized import quantized_linear as quantized_linear
from hiserve.kernels.routing import route_in_groups as route_in_groups
from hiserve.kernels.row_codecs import load_packed, store_heads, store_packed

is_exact = False

NO_LAST_LOC = -1
NO_OWNER = -1
PADDING_PAGE = 0


def rotations(
    positions: Tensor, frequencies: Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles ``position * frequency``.

    Angles are float32 products for every dtype of the model: checkpoints were trained with them, and at
    position 8,000 float64 angles would differ in the fourth digit.

    Args:
        positions: int64 ``[T]``.
        frequencies: float32 ``[head_dim / 2]``.
        attention_factor: Factor of cosines and sines.
        dtype: float32 or float64.

    Returns:
        Cosines and sines as ``rope`` takes them: ``[T, 1, head_dim]``.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos.mul_(attention_factor), sin.mul_(attention_factor)
    cos, sin = cos.to(dtype), sin.to(dtype)
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each head, its first half paired with its second (the Hugging Face layout).

    Args:
        x: ``[T, heads, head_dim]``.
        cos: ``[T, 1, head_dim]``, float32 or wider.
        sin: Like ``cos``, the first half negated: the partner of element i is element
            ``i ± head_dim / 2``, so one roll fetches all partners.
    """
    wide = x.to(cos.dtype)
    return (wide * cos).addcmul_(wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def store_kv(kv: LayerKV, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Writes keys and values ``[T, num_kv_heads, head_dim]`` into their slots, int64 ``[T]``; returns them as they are read."""
    if kv.scales is not None:
        return store_heads(kv, slots, k, v)
    kv.k.index_copy_(0, slots, k)
    kv.v.index_copy_(0, slots, v)
    return k, v


def rotate_and_store(
    qkv: Tensor, qk_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, kv: LayerKV, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms and rotates queries and keys, and writes keys and values into their slots.

    Args:
        qkv: ``[T, num_heads + 2 * num_kv_heads, head_dim]``: queries, keys, values. May be overwritten; tokens may lie apart.
        qk_weight: ``[num_heads + num_kv_heads, head_dim]``, of the norm of each query and key head before the
            rotation; None without one.
        eps: Of that norm.
        cos: From ``rotations``.
        sin: From ``rotations``.
        kv: The layer's pool.
        slots: int64 ``[T]``.

    Returns:
        Queries ``[T, num_heads, head_dim]``, keys and values ``[T, num_kv_heads, head_dim]``, rounded if they are packed; they
        may be views of one tensor. Queries are contiguous on a GPU.
    """
    num_kv_heads = kv.k.shape[1]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk, v = qkv.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), 1)
    if qk_weight is not None:
        qk = rms_norm(qk, qk_weight, eps)
    q, k = rope(qk, cos, sin).split_with_sizes((num_heads, num_kv_heads), 1)
    return q, *store_kv(kv, slots, k, v)


def store_latents(
    q: Tensor,
    row: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: LayerKV,
    slots: Tensor,
    packed: PackedPages | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotates the queries of latent attention, norms and rotates rows, and writes these into their slots.

    Args:
        q: ``[T, num_heads, nope_dim + rope_dim]``, the last ``rope_dim`` to be rotated. May be overwritten.
        row: ``[T, rank + rope_dim]``: latents, and keys before the rotation.
        weight: ``[rank]``, of the latents' norm.
        eps: Of that norm.
        cos: From ``rotations``, of ``rope_dim``.
        sin: Likewise.
        kv: The layer's pool, whose rows are in ``k``.
        slots: int64 ``[T]``.
        packed: How ``kv.k`` holds rows in 8 bits; None is as they are.

    Returns:
        Queries, as ``q``, and rows as they are read, ``[T, 1, rank + rope_dim]``.
    """
    rank, rope_dim = weight.shape[0], cos.shape[2]
    latent, key = row.unsqueeze(1).split_with_sizes((rank, rope_dim), -1)
    rows = torch.cat((rms_norm(latent, weight, eps), rope(key, cos, sin)), -1)
    if packed is None:
        kv.k.index_copy_(0, slots, rows)
    else:
        store_packed(kv.k[:, 0], slots, rows[:, 0], packed)
        rows = load_packed(kv.k[:, 0], slots, packed).to(rows.dtype)[:, None]
    plain, turned = q.split_with_sizes((q.shape[2] - rope_dim, rope_dim), -1)
    return torch.cat((plain, rope(turned, cos, sin)), -1), rows


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention over two parts of the keys; a sink belongs to one of the parts.

    Args:
        out_a: ``[T, num_heads, head_dim]``, zeros where a token saw no key.
        lse_a: ``[T, num_heads]``, float32 or wider: log of the sum of exponentials of its scores, -inf where it saw no
            key.
        out_b: Like ``out_a``, of the other part.
        lse_b: Like ``lse_a``.

    Returns:
        Both for all keys, in the dtypes of ``out_a`` and ``lse_a``.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == -torch.inf, 0)  # -inf less -inf is NaN
    share_a, share_b = (lse_a - finite).exp_().unsqueeze(-1), (lse_b - finite).exp_().unsqueeze(-1)
    return (out_a * share_a + out_b * share_b).to(out_a.dtype), lse


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_after_attention: bool = False) -> Tensor:
    """Projects ``[T, in_features]`` by ``[out_features, in_features]`` and adds an optional ``[out_features]``.

    ``x`` may be of a narrower type than the weight; the result is of the weight's.
    """
    return F.linear(x if x.dtype == weight.dtype else x.to(weight.dtype), weight, bias)


linear_parts, quantized_parts = linear, quantized_linear  # in one part


def act_mul(gate_up: Tensor, activation: Activation = SILU) -> Tensor:
    """The activation of ``[T, 2 n]``, gate first; returns ``[T, n]``."""
    gate, up = gate_up.chunk(2, -1)
    if activation == SILU:
        return F.silu(gate).mul_(up)
    if activation == GELU_TANH:
        return F.gelu(gate, approximate="tanh").mul_(up)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    inner = wide.square().mul_(activation.cubic).add_(1).mul_(wide).mul_(activation.slope)
    return ((wide * inner.sigmoid_()).to(gate.dtype).to(wide.dtype) * (up.to(wide.dtype) + activation.shift)).to(
        gate.dtype
    )


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Returns ``[T, n]`` times the rounded sigmoid of a gate of the same shape and type, whose rows may lie apart."""
    return x * gate.sigmoid()


def act_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """The activation of ``linear``, whose columns are gates, then ups."""
    return act_mul(linear(x, weight, bias), activation)


def act_inputs(gate_up: Tensor, activation: Activation, reader: QuantizedWeight | None) -> Tensor:
    """Returns ``act_mul``, whatever weight reads it."""
    return act_mul(gate_up, activation)


def route(
    logits: Tensor, num_per_token: int, is_normalized: bool, gated: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses the likeliest experts of each token.

    Args:
        logits: ``[T, num_experts]``; their softmax is taken in float32, or in float64 for float64.
        num_per_token: Experts to choose.
        is_normalized: Scale the shares of the chosen ones to sum to 1.
        gated: Tokens ``[T, n]`` and ``[n]``, of one type: the gate of a shared expert, whose share is the sigmoid of their
            product. None without.

    Returns:
        Shares, float32 or float64 ``[T, num_per_token]``, behind which that of a gated expert is one more column, and
        experts, int64 ``[T, num_per_token]``.
    """
    likelihood = logits.softmax(-1, torch.promote_types(logits.dtype, torch.float32))
    shares, experts = likelihood.topk(num_per_token, -1)
    if is_normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    if gated is not None:
        x, gate = gated
        shares = torch.cat((shares, F.linear(x, gate[None]).to(shares.dtype).sigmoid()), 1)
    return shares, experts


def mix_experts(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Weights,
    down: Weights,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = SILU,
    shared: tuple[Weights, Weights] | None = None,
) -> Tensor:
    """Returns each token's sum of its chosen experts' outputs, weighted by shares, in the dtype of the shares.

    Every expert computes every token, so that shapes are fixed. Outputs of experts that were not chosen are dropped,
    not multiplied by zero, because they may be infinite.

    Args:
        x: ``[T, n]``.
        shares: ``[T, k]``; if the shared expert has one too, it is the last of ``[T, k + 1]``.
        chosen: int64 ``[T, k]``, the experts the shares belong to.
        gate_up: ``[num_experts, 2 m, n]``.
        down: ``[num_experts, n, m]``.
        gate_up_bias: ``[num_experts, 2 m]``, or None.
        down_bias: ``[num_experts, n]``, or None.
        activation: Between both products.
        shared: ``[2 m, n]`` and ``[n, m]`` of an expert that computes every token, without biases; or None.

    Returns:
        ``[T, n]``, in the dtype of ``x``.
    """
    gate_up, down = plain(gate_up, x.dtype), plain(down, x.dtype)
    num_chosen = chosen.shape[1]
    share = shares.new_zeros(x.shape[0], gate_up.shape[0]).scatter_(1, chosen, shares[:, :num_chosen])
    is_chosen = torch.zeros_like(share, dtype=torch.bool).scatter_(1, chosen, True)
    out = shares.new_zeros(x.shape)
    for expert in range(gate_up.shape[0]):
        biases = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
        inner = act_mul(F.linear(x, gate_up[expert], biases[0]), activation)
        made = F.linear(inner, down[expert], biases[1]) * share[:, expert, None]
        out += torch.where(is_chosen[:, expert, None], made, 0.0)
    if shared is not None:
        into, back = (plain(each, x.dtype) for each in shared)
        made = F.linear(act_mul(F.linear(x, into), activation), back)
        out += made if shares.shape[1] == num_chosen else made * shares[:, num_chosen:]
    return out.to(x.dtype)


def list_pages(
    page_table: Tensor,
    kv_lens: Tensor,
    rows: Tensor,
    indptr: Tensor,
    page_size: int,
    out: Tensor,
    first: Tensor | None = None,
) -> None:
    """Concatenates pages of some rows: those of ``rows[i]`` at ``indptr[i]`` to ``indptr[i + 1]``.

    The host gives their number. Where the device's length is shorter, as for a row that failed the check, the row's
    table is arbitrary there, and the padding page is listed instead.

    Args:
        page_table: int32 ``[B, W]``.
        kv_lens: int64 ``[B]``.
        rows: int64 ``[n]``.
        indptr: int32 ``[n + 1]``, its steps at most W, less ``first``.
        page_size: Tokens per page.
        out: int32, at least ``indptr[n]`` long; undefined after that.
        first: int32 ``[n]``. The entry at which the list of each row starts; None is 0.
    """
    places = torch.arange(out.shape[0], device=out.device)
    item = torch.searchsorted(indptr[1:], places, right=True).clamp_(max=rows.shape[0] - 1)
    entry = places - indptr[item] if first is None else places - indptr[item] + first[item]
    entry.clamp_(max=page_table.shape[1] - 1)
    row = rows[item]
    out.copy_(page_table[row, entry].masked_fill_(entry * page_size >= kv_lens[row], PADDING_PAGE))


def last_loc(page_table: Tensor, computed_len: Tensor, page_size: int) -> Tensor:
    """Slot of the token at ``computed_len - 1``, or -1 for an empty row.

    ``page_table`` is int32 ``[B, W]``, ``computed_len`` int64 ``[B]``. Lengths above ``W * page_size`` give a
    meaningless result.
    """
    last = (computed_len - 1).clamp_(0, page_table.shape[1] * page_size - 1)
    page = page_table.gather(1, (last // page_size)[:, None])[:, 0].long()
    return torch.where(computed_len > 0, page * page_size + last % page_size, NO_LAST_LOC)


def is_last_loc_legal(location: Tensor, computed_len: Tensor, page_size: int, num_slots: int) -> Tensor:
    """Whether each ``last_loc`` is -1, or a slot past the padding page that agrees with the length: bool ``[B]``."""
    in_range = (location >= page_size) & (location < num_slots)
    agrees = (location + 1) % page_size == computed_len % page_size
    return (location == NO_LAST_LOC) | (in_range & agrees)


def is_table_owned(
    page_table: Tensor,
    entry_owner: Tensor,
    page_owner: Tensor,
    kv_lens: Tensor,
    page_size: int,
    first: Tensor | None = None,
) -> Tensor:
    """Whether every entry a row reads or writes still refers to the allocation it was written for: bool ``[B]``.

    Args:
        page_table: int32 ``[B, W]``.
        entry_owner: int32 ``[B, W]``. The allocation each entry was written for.
        page_owner: int32 ``[num_pages]``. The allocation each page belongs to now.
        kv_lens: int64 ``[B]``. Entries up to here are in use.
        page_size: Tokens per page.
        first: int64 ``[B]``. Entries below this are not in use; None is 0.
    """
    entries = torch.arange(page_table.shape[1], device=page_table.device)
    unused = entries * page_size >= kv_lens[:, None]
    if first is not None:
        unused |= entries < first[:, None]
    last_page = page_owner.shape[0] - 1
    is_page = (page_table >= 0) & (page_table <= last_page)
    is_own = is_page & (page_owner[page_table.clamp(0, last_page).long()] == entry_owner)
    return (is_own | unused).all(1)

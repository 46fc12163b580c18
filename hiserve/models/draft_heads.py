"""Draft heads that read the model's states (EAGLE-3 and MTP), and draft models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.core.kv_groups import CacheGroupSpec
from hiserve.distributed.exchange import Exchanged
from hiserve.distributed.shard import WHOLE
from hiserve.errors import ModelError
from hiserve.layers import Linear, RMSNorm, Rotary
from hiserve.models.decoder import Layer, adding_exchange, attention_shape, make_layer, make_rotary
from hiserve.models.delta_layer import DeltaLayer
from hiserve.models.draft_config import DraftConfig
from hiserve.models.draft_formats import Head
from hiserve.models.loading import AnyDecoder, load_decoder
from hiserve.models.stream_head import StreamHead
from hiserve.models.weights import load_head_parameters


class DraftHead(Protocol):
    """Computes for each token logits of the next one."""

    feature_size: int  # elements that it takes of the token before each, and carries from draft to draft; 0 is none
    shift: int  # the rotary position of token j is ``j - shift``
    aux_layers: tuple[int, ...]  # layers of the model that it takes, as for ``Decoder``
    is_spread: bool  # its logits have columns of all the model's tokens, though a rank of a group computes some
    sinks: tuple[Tensor | None, ...]  # of its layers, as for ``AttentionShape``

    def groups(self, dtype: str) -> tuple[CacheGroupSpec, ...]:
        """Returns the KV groups of its layers, stored as ``dtype``."""

    def exchanges(self, num_tokens: int, num_logits: int) -> list[Exchanged]:
        """Returns what a rank exchanges in a forward of so many tokens and rows of logits, in order."""

    def fuse(self, aux_states: Tensor) -> Tensor:
        """Returns hidden states ``[T, feature_size]`` made of the model's, ``[T, len(aux_layers) * hidden_size]``."""

    def forward(
        self, inputs: ForwardInputs, hidden_states: Tensor, layers: Sequence[LayerKV], attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """Computes tokens and stores their keys and values.

        Args:
            inputs: The batch; its positions are rotary ones.
            hidden_states: ``[T, feature_size]``, of the token before each: fused, or returned by this method.
                Unchanged.
            layers: The pool's views of its group.
            attention: A backend on which ``plan(inputs)`` was called.

        Returns:
            Logits ``[N, vocab_size]`` over the model's vocabulary, -inf for tokens that it cannot draft, of a rank of a group
            over its tokens alone, unless the head is spread; and the states to carry, ``[N, feature_size]``.
        """


@dataclass(frozen=True, slots=True, eq=False)
class _Body:
    """The common part of heads: a decoder layer, its last norm, and the output head."""

    layer: Layer
    rotary: Rotary
    norm: RMSNorm
    output: Linear  # states to logits
    # int64 ``[n]``, the model's token of each that this rank can draft; None if the vocabularies are the same.
    tokens: Tensor | None
    vocab_size: int  # of the model
    carries_normed: bool  # the carried state is that after ``norm``

    def exchanges(self, num_tokens: int, num_logits: int) -> list[Exchanged]:
        """As ``DraftHead.exchanges``, those of the embedding included."""
        size, dtype = self.norm.weight.shape[0], self.norm.weight.dtype
        after = Exchanged("sum", num_logits, size, dtype)
        return [Exchanged("sum", num_tokens, size, dtype), after, after]

    def __call__(
        self, x: Tensor, stream: Tensor, inputs: ForwardInputs, layers: Sequence[LayerKV], attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """Like ``DraftHead.forward``, for attention's input and the residual stream before it, which is unchanged.

        With one layer, stored keys and values do not depend on attention: without rows of logits it is skipped.
        """
        (kv,) = layers
        if inputs.before_layer is not None:
            inputs.before_layer(0)
        rotation = self.rotary(inputs.positions)
        if not inputs.logits_rows.shape[0]:
            assert not isinstance(self.layer.attention, DeltaLayer), "a head of one layer has attention"
            self.layer.attention.store(x, inputs, rotation, kv)
            return stream.new_empty((0, self.vocab_size)), stream[:0]
        attn_out = self.layer.attention(x, inputs, rotation, kv, attention)
        stream = stream.index_select(0, inputs.logits_rows)
        normed = self.norm.add(self.layer.finish(attn_out.index_select(0, inputs.logits_rows), stream), stream)
        logits = self.output(normed)
        if self.tokens is not None:
            spread = logits.new_full((logits.shape[0], self.vocab_size), -torch.inf)
            logits = spread.index_copy_(1, self.tokens, logits)
        return logits, normed if self.carries_normed else stream


class Eagle3Head:
    """EAGLE-3 (Li et al., arXiv:2503.01840): fused states of several layers, beside the embedding.

    ``parameters`` are named as in ``Head.table``; ``tokens`` come from ``load_head_parameters``.
    """

    shift = 1
    sinks: tuple[Tensor | None, ...] = ()

    def __init__(
        self, draft: DraftConfig, parameters: dict[str, Tensor], tokens: Tensor | None, target: AnyDecoder, max_len: int
    ) -> None:
        head, ops = _head(draft), target.ops
        self.feature_size = draft.feature_size
        self.aux_layers = draft.aux_layers
        self.groups = draft.kv_groups
        own = parameters.pop("embedding", None)
        is_shared = own is None or torch.equal(own, target.embedding.weight)
        self._embedding = (
            target.embedding if own is None or is_shared else replace(target.embedding, weight=own, scale=None)
        )
        self._fuse = Linear(parameters.pop("fuse"), ops)
        eps = draft.model.norm_eps
        self._fuse_norm = RMSNorm(parameters.pop("fuse_norm"), eps, ops) if head.norm_before_fuse else None
        self._state_norm = RMSNorm(parameters.pop("state_norm"), eps, ops)
        self._norm_before_residual = head.norm_before_residual
        self.is_spread = tokens is not None
        if tokens is not None and target.exchange is not None:
            tokens = tokens[slice(*target.exchange.shard.tokens(head.vocab_size))]
        self._body = _body(draft, parameters, Linear(parameters.pop("head"), ops), tokens, target, max_len)

    def exchanges(self, num_tokens: int, num_logits: int) -> list[Exchanged]:
        return self._body.exchanges(num_tokens, num_logits)

    def fuse(self, aux_states: Tensor) -> Tensor:
        return self._fuse(aux_states if self._fuse_norm is None else self._fuse_norm(aux_states))

    def forward(
        self, inputs: ForwardInputs, hidden_states: Tensor, layers: Sequence[LayerKV], attention: Attention
    ) -> tuple[Tensor, Tensor]:
        normed = self._state_norm(hidden_states)
        embedded = self._body.layer.input_norm(self._embedding(inputs.input_ids))
        stream = normed if self._norm_before_residual else hidden_states
        return self._body(torch.cat((embedded, normed), -1), stream, inputs, layers, attention)


class MTPHead:
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437): joins last states and embedding in a residual stream.

    Embedding and output head are the model's. ``parameters`` are named as in ``Head.table``.
    """

    shift = 1
    is_spread = False
    sinks: tuple[Tensor | None, ...] = ()

    def __init__(self, draft: DraftConfig, parameters: dict[str, Tensor], target: AnyDecoder, max_len: int) -> None:
        head, ops, eps = _head(draft), target.ops, draft.model.norm_eps
        self.feature_size = draft.feature_size
        self.aux_layers = draft.aux_layers
        self.groups = draft.kv_groups
        self._embedding = target.embedding
        self._embedding_norm = RMSNorm(parameters.pop("embedding_norm"), eps, ops)
        self._state_norm = RMSNorm(parameters.pop("state_norm"), eps, ops)
        self._join = Linear(parameters.pop("join"), ops)
        self._state_first = head.format.state_first
        self._masks_first = head.format.masks_first
        self._body = _body(draft, parameters, target.head, None, target, max_len)

    def exchanges(self, num_tokens: int, num_logits: int) -> list[Exchanged]:
        return self._body.exchanges(num_tokens, num_logits)

    def fuse(self, aux_states: Tensor) -> Tensor:
        """Returns its argument: MTP takes one layer."""
        return aux_states

    def forward(
        self, inputs: ForwardInputs, hidden_states: Tensor, layers: Sequence[LayerKV], attention: Attention
    ) -> tuple[Tensor, Tensor]:
        embedded = self._embedding(inputs.input_ids)
        if self._masks_first:
            embedded = embedded.masked_fill(inputs.positions[:, None] == 0, 0)
        both = self._embedding_norm(embedded), self._state_norm(hidden_states)
        stream = self._join(torch.cat(both[::-1] if self._state_first else both, -1))
        return self._body(self._body.layer.input_norm(stream), stream, inputs, layers, attention)


class DraftModel:
    """A small model with the same vocabulary. It takes only tokens."""

    shift = 0
    is_spread = False
    feature_size = 0
    aux_layers: tuple[int, ...] = ()

    def __init__(self, draft: DraftConfig, decoder: AnyDecoder) -> None:
        self.groups = draft.kv_groups
        self.sinks = decoder.sinks
        self._decoder = decoder

    def exchanges(self, num_tokens: int, num_logits: int) -> list[Exchanged]:
        return self._decoder.exchanges(num_tokens, num_logits, wants_hidden_states=False)

    def fuse(self, aux_states: Tensor) -> Tensor:
        """Returns empty hidden states."""
        return aux_states[:, :0]

    def forward(
        self, inputs: ForwardInputs, hidden_states: Tensor, layers: Sequence[LayerKV], attention: Attention
    ) -> tuple[Tensor, Tensor]:
        logits = self._decoder.forward(inputs, layers, attention).logits
        return logits, hidden_states.new_empty((logits.shape[0], 0))


def load_draft(
    draft: DraftConfig, target: AnyDecoder, *, dtype: str, device: str, load_format: str, max_len: int
) -> DraftHead:
    """Reads the checkpoint of a draft head or model, or draws random weights of its shape.

    Args:
        draft: From ``find_draft``.
        target: The model that it drafts for, on the same device, of the same type; a rank's share of it drafts with a share.
        dtype: Type name of weights and activations, a key of ``config.options.DTYPE_BYTES``.
        device: ``cpu`` or ``cuda``.
        load_format: ``auto`` or ``dummy``.
        max_len: Tokens of the longest request.

    Raises:
        ModelError: The checkpoint cannot be used.
    """
    if draft.head is None:
        try:
            decoder = load_decoder(
                draft.folder,
                draft.model,
                dtype=dtype,
                device=device,
                load_format=load_format,
                max_len=max_len,
                exchange=target.exchange,
            )
        except ModelError as error:
            raise ModelError(error.message, param="spec") from None
        return DraftModel(draft, decoder)
    shard = WHOLE if target.exchange is None else target.exchange.shard
    parameters, tokens = load_head_parameters(draft, getattr(torch, dtype), torch.device(device), load_format, shard)
    draft = draft.local(shard)
    if draft.model.compressed is not None:
        return StreamHead(draft, parameters, target, max_len)
    if draft.kind == "eagle3":
        return Eagle3Head(draft, parameters, tokens, target, max_len)
    return MTPHead(draft, parameters, target, max_len)


def _body(
    draft: DraftConfig,
    parameters: dict[str, Tensor],
    output: Linear,
    tokens: Tensor | None,
    target: AnyDecoder,
    max_len: int,
) -> _Body:
    model, weight, ops, exchange = draft.model, target.embedding.weight, target.ops, target.exchange
    return _Body(
        layer=make_layer(model, parameters, 0, ops, exchange),
        rotary=make_rotary(model.rope, model, max_len, weight, ops),
        norm=RMSNorm(parameters.pop("norm"), model.norm_eps, ops, adding_exchange(model, exchange)),
        output=output,
        tokens=tokens,
        vocab_size=model.vocab_size,
        carries_normed=_head(draft).format.carries_normed,
    )


def _head(draft: DraftConfig) -> Head:
    assert draft.head is not None, f"{draft.kind} is no head"
    return draft.head


def draft_attention_shape(
    draft: DraftConfig,
    *,
    dtype: torch.dtype,
    page_size: int,
    sinks: tuple[Tensor | None, ...] = (),
    packs_rows: bool = False,
) -> AttentionShape:
    """Like ``attention_shape``, of a draft head or model. A head hides position 0: its token has no state before it."""
    shape = attention_shape(draft.model, dtype=dtype, page_size=page_size, sinks=sinks, packs_rows=packs_rows)
    return replace(shape, hides_first=draft.head is not None)

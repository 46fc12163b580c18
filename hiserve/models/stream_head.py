"""Multi-token prediction from several residual streams (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.attention.union import UnionAttention
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.distributed.exchange import Exchanged
from hiserve.layers import Linear, RMSNorm
from hiserve.models.compressed_config import LayerKind
from hiserve.models.draft_config import DraftConfig
from hiserve.models.loading import AnyDecoder
from hiserve.models.stream_decoder import Rotary, make_stream_layer
from hiserve.models.streams import make_mix


class StreamHead:
    """Joins the embedding with the model's streams behind its last layer, in a layer with a window and experts.

    Embedding and output head are the model's. ``parameters`` are named as in ``stream_head_table``.
    """

    shift = 1
    is_spread = False
    sinks: tuple[Tensor | None, ...] = ()

    def __init__(self, draft: DraftConfig, parameters: dict[str, Tensor], target: AnyDecoder, max_len: int) -> None:
        model, ops = draft.model, target.ops
        assert model.compressed is not None, model.architecture
        self.feature_size = draft.feature_size
        self.aux_layers = draft.aux_layers
        self.groups = draft.kv_groups
        self._num_streams = draft.num_streams
        self._embedding = target.embedding
        self._output = target.head
        self._embedding_norm, self._state_norm, self._norm = (
            RMSNorm(parameters.pop(name), model.norm_eps, ops) for name in ("embedding_norm", "state_norm", "norm")
        )
        self._embedding_join, self._state_join = (
            Linear(parameters.pop(name), ops) for name in ("embedding_join", "state_join")
        )
        self._rotary = Rotary(model, max_len, target.embedding.weight)
        self._layer = make_stream_layer(model, parameters, 0, ops, target.exchange)
        self._join = make_mix(parameters, "head_mix", model.compressed.streams, model.norm_eps)

    def exchanges(self, num_tokens: int, num_logits: int) -> list[Exchanged]:
        """As ``DraftHead.exchanges``: of the embedding, and of attention and experts where logits are wanted."""
        size, dtype = self._embedding.weight.shape[1], self._embedding.weight.dtype
        whole, wanted = (Exchanged("sum", rows, size, dtype) for rows in (num_tokens, num_logits))
        return [whole, whole, wanted] if num_logits else [whole]

    def fuse(self, aux_states: Tensor) -> Tensor:
        """Returns its argument: it takes the streams as they are."""
        return aux_states

    def forward(
        self, inputs: ForwardInputs, hidden_states: Tensor, layers: Sequence[LayerKV], attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """As ``DraftHead.forward``; without rows of logits only the rows of the window are stored."""
        assert isinstance(attention, UnionAttention), type(attention)
        if inputs.before_layer is not None:
            inputs.before_layer(None)
        (kv,), layer = layers, self._layer
        embedded = self._embedding_join(self._embedding_norm(self._embedding(inputs.input_ids)))
        states = hidden_states.view(-1, embedded.shape[1])
        streams = self._state_join(self._state_norm(states)).view(-1, self._num_streams, embedded.shape[1])
        streams = streams + embedded[:, None]
        turns, wanted = self._rotary(inputs.positions)[LayerKind.WINDOW], inputs.logits_rows
        if not wanted.shape[0]:
            row = layer.attention.row(layer.input_norm(layer.attn_mix.split(streams).x))
            layer.attention.store(row[:, None, :][:, :0], row, inputs, turns, kv, attention)
            return self._output(embedded[:0]), hidden_states[:0]
        streams = layer.attend(streams, inputs, turns, kv, attention).index_select(0, wanted)
        streams = layer.finish(streams, inputs.input_ids.index_select(0, wanted))
        return self._output(self._norm(self._join.join(streams))), streams.flatten(1)

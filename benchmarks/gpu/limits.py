"""The least that a step, and a cycle of drafting and verifying, must read and compute, from a model's shape."""

from __future__ import annotations

from dataclasses import dataclass

from hiserve.config.options import DTYPE_BYTES
from hiserve.models.draft_config import DraftConfig
from hiserve.models.model_config import ModelConfig


@dataclass(frozen=True)
class Limits:
    """Bytes and operations of a decoder without experts."""

    weight_bytes: int  # read by every step: all but the embedding, which counts where it is the output head too
    kv_bytes: int  # keys and values of one token, all layers
    linear_params: int  # in the products of the layers
    attention_width: int  # elements of all queries of one token, all layers

    @classmethod
    def of(cls, model: ModelConfig, dtype: str) -> Limits:
        """Returns those of a shape whose weights, keys and values are all of one type."""
        table = model.vocab_size * model.hidden_size
        layers = model.num_params - table * (1 if model.tie_embeddings else 2)
        element = DTYPE_BYTES[dtype]
        return cls(
            weight_bytes=(layers + table) * element,
            kv_bytes=model.facts().slot_elements * element,
            linear_params=layers,
            attention_width=model.num_layers * model.num_heads * model.head_dim,
        )

    def decode_bytes(self, kv_tokens: float) -> float:
        """Bytes that one decoding step reads whose rows attend over so many tokens together."""
        return self.weight_bytes + self.kv_bytes * kv_tokens

    def prefill_flop(self, num_tokens: int) -> int:
        """Operations of one prompt: the products of the layers, and causal attention."""
        return 2 * self.linear_params * num_tokens + 2 * self.attention_width * num_tokens**2


@dataclass(frozen=True)
class CycleLimits:
    """Sizes of a model and of a head that drafts for it; all weights of one type."""

    model: Limits  # of a plain step
    element: int  # bytes of a weight
    head_params: int  # of the model's output head
    fuse_params: int  # of what joins the states that the head sees, once a cycle
    layer_params: int  # of the head's layer, read by each of its forwards
    draft_head_params: int  # of the output head that it speaks by, likewise

    @classmethod
    def of(cls, model: ModelConfig, draft: DraftConfig, dtype: str, draft_vocab_size: int) -> CycleLimits:
        """Returns those of an EAGLE-3 head, or of an MTP head, which speaks by the model's output head."""
        table, own_table = model.vocab_size * model.hidden_size, draft_vocab_size * draft.feature_size
        is_eagle = draft.kind == "eagle3"
        fused = len(draft.aux_layers) * model.hidden_size * draft.feature_size if is_eagle else 0
        return cls(
            model=Limits.of(model, dtype),
            element=DTYPE_BYTES[dtype],
            head_params=table,
            fuse_params=fused,
            layer_params=draft.num_params - fused - (own_table if is_eagle else 0),
            draft_head_params=own_table,
        )

    def cost(self, rows: int, num_draft: int, context: float, ceilings: dict[str, float]) -> float:
        """Returns the least cost of a cycle, in plain steps; each of ``rows`` attends over ``context`` tokens."""
        if not num_draft:
            return 1.0
        cycle_s = self._step_s(rows, 1 + num_draft, context, ceilings) + self._drafts_s(rows, num_draft, ceilings)
        return cycle_s / self._step_s(rows, 1, context, ceilings)

    def _step_s(self, rows: int, tokens: int, context: float, ceilings: dict[str, float]) -> float:
        """Seconds of a forward of the model over so many tokens of each row, all of which have logits."""
        rate, flop = ceilings["copy_bytes_per_s"], ceilings["matmul_flop_per_s"]
        products = 2 * (self.model.linear_params + self.head_params) * rows * tokens
        return max(self.model.weight_bytes / rate, products / flop) + rows * context * self.model.kv_bytes / rate

    def _drafts_s(self, rows: int, num_draft: int, ceilings: dict[str, float]) -> float:
        """Seconds of all draft forwards: one over what was verified and the token behind it, the others over a token a row."""
        rate, flop = ceilings["copy_bytes_per_s"], ceilings["matmul_flop_per_s"]

        def product_s(params: int, tokens: int) -> float:
            return max(self.element * params / rate, 2 * params * tokens / flop)

        layers_s = product_s(self.layer_params, rows * (num_draft + 2))
        layers_s += (num_draft - 1) * product_s(self.layer_params, rows)
        fuse_s = product_s(self.fuse_params, rows * (num_draft + 1))
        return fuse_s + layers_s + num_draft * product_s(self.draft_head_params, rows)

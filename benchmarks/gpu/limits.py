"""What a step must read and compute at least, from a model's shape."""

from __future__ import annotations

from dataclasses import dataclass

from hiserve.config.options import DTYPE_BYTES
from hiserve.models.model_config import ModelConfig


@dataclass(frozen=True)
class Limits:
    """Bytes and operations of a decoder without experts.

    Attributes:
        weight_bytes: Read by every step: all but the embedding, which counts where it is the output head too.
        kv_bytes: Keys and values of one token, all layers.
        linear_params: In the products of the layers.
        attention_width: Elements of all queries of one token, all layers.
    """

    weight_bytes: int
    kv_bytes: int
    linear_params: int
    attention_width: int

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

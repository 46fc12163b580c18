"""A draft head computed row by row from its published tensors, in float64, as a server without any batching would.

It shares nothing with the recipe: rotary positions are complex numbers, attention is one query at a time, and the
keys of a chain are kept in a list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.nano.heads import Seen
from tools.nano.model import NanoConfig

# Drafts so far to the token that the next step embeds.
NextToken = Callable[[list[Tensor]], int]


@dataclass(frozen=True, slots=True)
class HeadOracle:
    """A head of kind ``eagle3`` or ``mtp``.

    Attributes:
        kind: Which of the two.
        tensors: By published name.
        config: The target's shape.
        embedding: ``[vocab, hidden]``. The target's.
    """

    kind: str
    tensors: dict[str, Tensor]
    config: NanoConfig
    embedding: Tensor

    def chain(self, ids: Tensor, seen: Seen, row: int, num_steps: int, next_token: NextToken) -> Tensor:
        """Logits ``[num_steps, vocab]`` of the chain that starts at ``row``.

        Args:
            ids: int64 ``[T]``.
            seen: The target's pass, without a batch dimension.
            row: In ``[0, T - 2]``.
            num_steps: Drafts.
            next_token: Chooses the token that each step after the first embeds.
        """
        past: list[tuple[Tensor, Tensor]] = []
        state = logits = torch.empty(0)
        for r in range(row + 1):
            state, logits = self._row(int(ids[r + 1]), self._first(seen, r), r, past)
        drafts = [logits]
        for step in range(1, num_steps):
            state, logits = self._row(next_token(drafts), state, row + step, past)
            drafts.append(logits)
        return torch.stack(drafts)

    def _get(self, name: str) -> Tensor:
        prefix = f"model.layers.{self.config.num_layers}." if self.kind == "mtp" else ""
        return self.tensors[prefix + name].double()

    def _of_layer(self, name: str) -> Tensor:
        return self._get(name if self.kind == "mtp" else f"midlayer.{name}")

    def _first(self, seen: Seen, row: int) -> Tensor:
        return self._get("fc.weight") @ seen.aux[row].double() if self.kind == "eagle3" else seen.last[row].double()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + self.config.norm_eps).sqrt() * weight

    def _turned(self, vector: Tensor, position: int) -> Tensor:
        half = self.config.head_dim // 2
        pairs = torch.complex(vector[:half], vector[half:])
        angles = position * self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag])

    def _row(
        self, token: int, state: Tensor, position: int, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        embedded = self.embedding[token].double()
        if self.kind == "eagle3":
            stream = state
            normed = (
                self._norm(embedded, self._of_layer("input_layernorm.weight")),
                self._norm(state, self._of_layer("hidden_norm.weight")),
            )
            x = torch.cat(normed)
        else:
            both = (self._norm(embedded, self._get("enorm.weight")), self._norm(state, self._get("hnorm.weight")))
            stream = self._get("eh_proj.weight") @ torch.cat(both)
            x = self._norm(stream, self._get("input_layernorm.weight"))
        stream = stream + self._attended(x, position, past)
        m = self._norm(stream, self._of_layer("post_attention_layernorm.weight"))
        gate, up = (self._of_layer(f"mlp.{name}_proj.weight") @ m for name in ("gate", "up"))
        stream = stream + self._of_layer("mlp.down_proj.weight") @ (gate * torch.sigmoid(gate) * up)
        if self.kind == "eagle3":
            return stream, self._get("lm_head.weight") @ self._norm(stream, self._get("norm.weight"))
        normed_stream = self._norm(stream, self._get("shared_head.norm.weight"))
        return normed_stream, self.embedding.double() @ normed_stream

    def _attended(self, x: Tensor, position: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of one row over ``past``, to which the row's own keys and values are added first."""
        q, k, v = (
            (self._of_layer(f"self_attn.{name}_proj.weight") @ x).view(-1, self.config.head_dim) for name in "qkv"
        )
        past.append((torch.stack([self._turned(head, position) for head in k]), v))
        group, outs = self.config.num_heads // self.config.num_kv_heads, []
        for number, query in enumerate(q):
            turned, of = self._turned(query, position), number // group
            scores = torch.stack([turned @ keys[of] for keys, _ in past]) * self.config.head_dim**-0.5
            outs.append(scores.softmax(0) @ torch.stack([values[of] for _, values in past]))
        return self._of_layer("self_attn.o_proj.weight") @ torch.cat(outs)

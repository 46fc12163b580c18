"""Measured figures beside their bars, the gate's counts as one, and the least that a step or a cycle of drafts must do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hiserve.config.options import DTYPE_BYTES
from hiserve.ipc.messages import GateCounts
from hiserve.models.draft_config import DraftConfig
from hiserve.models.model_config import ModelConfig
from hiserve.runners.gate import Action, Reason

# Reasons of steps that no graph is made for. Any other reason is a lost replay: loads, a page that moved, a capture or a
# replay that failed.
NOT_ELIGIBLE = frozenset(
    reason.value for reason in (Reason.TOKENS, Reason.ROWS, Reason.CONTEXT, Reason.WIDTH, Reason.GRAPHS_OFF)
)


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        ratio: The value against its limit or peer, larger is better; None where there is nothing to compare with.
    """

    name: str
    value: float
    unit: str
    ratio: float | None = None
    bar: float | None = None  # least ratio; None where there is no bar
    against: str = ""  # what the ratio compares with

    @property
    def is_met(self) -> bool:
        return self.bar is None or (self.ratio is not None and self.ratio >= self.bar)

    @property
    def verdict(self) -> str:
        return "" if self.bar is None else "ok" if self.is_met else "MISSED"


def table(figures: Iterable[dict[str, Any]]) -> str:
    rows = [("figure", "value", "", "ratio", "bar", "")]
    for each in (Figure(**given) for given in figures):
        ratio, bar = ("-" if number is None else f"{number:.3f}" for number in (each.ratio, each.bar))
        rows.append((each.name, f"{each.value:.4g}", each.unit, ratio, bar, each.verdict))
    return "\n".join(f"{row[0]:<46} {row[1]:>9} {row[2]:<8} {row[3]:>7} {row[4]:>7} {row[5]}".rstrip() for row in rows)


def share_of_eligible(gate: GateCounts) -> float | None:
    """Returns the share of the steps that a graph was made for that were replayed; None without such steps."""
    replayed = sum(gate.get(Action.REPLAY.value, {}).values())
    eager = gate.get(Action.EAGER.value, {})
    lost = sum(gate.get(Action.DEFER.value, {}).values())
    lost += sum(count for reason, count in eager.items() if reason not in NOT_ELIGIBLE)
    return replayed / (replayed + lost) if replayed + lost else None


def share_replayed(gate: GateCounts) -> float:
    """Returns the share of all steps that were replayed."""
    steps = sum(sum(reasons.values()) for reasons in gate.values())
    return sum(gate.get(Action.REPLAY.value, {}).values()) / steps


def replays(gate: GateCounts, bar: float) -> Figure:
    """Returns the share of all steps that were replayed; its ratio is that of the steps that a graph was made for."""
    name = "replayed steps under host traffic, against those that a graph was made for"
    return Figure(name, share_replayed(gate), "of steps", share_of_eligible(gate), bar, "the gate's reasons")


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
        """Seconds of all draft forwards: one over what was verified and the next token, the others over a token a row."""
        rate, flop = ceilings["copy_bytes_per_s"], ceilings["matmul_flop_per_s"]

        def product_s(params: int, tokens: int) -> float:
            return max(self.element * params / rate, 2 * params * tokens / flop)

        layers_s = product_s(self.layer_params, rows * (num_draft + 2))
        layers_s += (num_draft - 1) * product_s(self.layer_params, rows)
        fuse_s = product_s(self.fuse_params, rows * (num_draft + 1))
        return fuse_s + layers_s + num_draft * product_s(self.draft_head_params, rows)

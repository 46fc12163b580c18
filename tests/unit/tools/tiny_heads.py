"""A target of eight narrow layers, heads for it, and a corpus of a few dialogues, for tests of the recipe."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tools.nano.heads import HEADS, Head, unroll
from tools.nano.heads import observe as observe
from tools.nano.model import Nano, NanoConfig
from tools.nano.stream import Arrays

CONFIG = NanoConfig(
    vocab_size=48,
    hidden_size=32,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    rope_theta=100.0,
    max_positions=192,
)
BOS, END, USER, ASSISTANT = 0, 1, 4, 5


def tiny_target(seed: int) -> Nano:
    """A frozen target whose distributions are far from flat and whose states differ from layer to layer."""
    torch.manual_seed(seed)
    target = Nano(CONFIG).requires_grad_(False).eval()
    for name, parameter in target.named_parameters():
        wider = 7 if name == "embed_tokens.weight" else 15
        parameter.copy_(1 + 0.3 * torch.randn_like(parameter) if parameter.ndim == 1 else parameter * wider)
    target.norm.weight.mul_(4)
    return target


def tiny_head(kind: str, target: Nano, seed: int) -> Head:
    """A head with random weights, norms included, that bfloat16 holds exactly."""
    torch.manual_seed(seed)
    head = HEADS[kind](target).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16().float())
    return head


def tiny_ids(seed: int, *shape: int) -> Tensor:
    """Random ordinary tokens, int64."""
    return torch.randint(7, CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def draft_logits(
    head: Head, target: Nano, ids: Tensor, num_steps: int, start: int = 0, rows: int | None = None
) -> Tensor:
    """Logits ``[num_steps, B, W, vocab]`` of the unrolled head."""
    embedding = target.embed_tokens.weight
    steps = list(unroll(head, embedding, ids, observe(target, ids), num_steps, start, rows))
    return torch.stack(steps) @ head.output_weight(embedding).T


def tiny_corpus(seed: int) -> Arrays:
    """Six dialogues of two sources in each part, in the layout of ``corpus.npz``."""
    random = np.random.default_rng(seed)

    def dialogue() -> list[int]:
        turns = [[role, *random.integers(7, CONFIG.vocab_size, 5), END] for role in (USER, ASSISTANT) * 2]
        return [int(token) for turn in turns for token in turn]

    packed: Arrays = {"weights": np.asarray([2, 1]), "source_names": np.asarray(["coffee", "services"])}
    for part, head in (("body", []), ("early", [BOS]), ("report", [BOS])):
        rows = [head + dialogue() for _ in range(6)]
        packed[f"{part}_tokens"] = np.asarray([token for row in rows for token in row], dtype=np.uint16)
        packed[f"{part}_lengths"] = np.asarray([len(row) for row in rows])
        packed[f"{part}_sources"] = np.asarray([0, 0, 0, 1, 1, 1])
    packed["head_tokens"] = np.asarray([BOS], dtype=np.uint16)
    packed["head_lengths"], packed["head_sources"] = np.asarray([1]), np.asarray([-1])
    return packed

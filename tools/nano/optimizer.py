"""The optimizer and the course of its learning rate, for the model and for its heads."""

import math

import torch
from torch import nn


def adamw(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices and none on the norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, warmup: int, done: float, end: float) -> float:
    """The learning rate over its peak: linear warm-up, then a cosine from 1 to ``end``.

    Args:
        step: Steps made.
        warmup: Steps of warm-up.
        done: How much of the run is over, in [0, 1] or beyond.
        end: In [0, 1].
    """
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return min(1.0, (step + 1) / warmup) * (end + (1 - end) * cosine)

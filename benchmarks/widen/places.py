"""Where the coordinates of a narrow model lie in a wide one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.models.model_config import ModelConfig


@dataclass(frozen=True)
class Axis:
    """One dimension of a matrix.

    Attributes:
        size: In the wide model.
        places: int64 ``[narrow size]``. Where each coordinate of the narrow model lies.
        taken: int64. Those, and what else of the wide model must be zero for their sake: the rest of their heads.
    """

    size: int
    places: Tensor
    taken: Tensor

    def repeated(self, count: int) -> Axis:
        """Returns this axis several times over, one behind the other."""
        begins = self.size * torch.arange(count)[:, None]
        return Axis(self.size * count, (begins + self.places).flatten(), (begins + self.taken).flatten())


class Places:
    """Layers, heads and pairs of a narrow model in a wide one.

    Layers are spread evenly. Query heads stay with their key and value head. With the same ``rope_theta``, heads that
    are r times as wide have every frequency of the narrow ones, to the last bit, in each r-th pair.

    Args:
        narrow: Shape of the small model.
        wide: Of the large one.

    Attributes:
        layers: The wide layer that each narrow one lies in; others are extra.
        axes: By name.

    Raises:
        ValueError: The narrow model does not fit, or one of them is no plain Llama.
    """

    def __init__(self, narrow: ModelConfig, wide: ModelConfig) -> None:
        _refuse(narrow, wide)
        self.narrow, self.wide = narrow, wide
        self.layers = tuple(layer * wide.num_layers // narrow.num_layers for layer in range(narrow.num_layers))
        group, wide_group = narrow.num_heads // narrow.num_kv_heads, wide.num_heads // wide.num_kv_heads
        queries = [head // group * wide_group + head % group for head in range(narrow.num_heads)]
        self.axes = {
            "hidden": _first(narrow.hidden_size, wide.hidden_size),
            "inner": _first(narrow.intermediate_size, wide.intermediate_size),
            "vocab": _first(narrow.vocab_size, wide.vocab_size),
            "queries": self._heads(queries, wide.num_heads),
            "keys": self._heads(list(range(narrow.num_kv_heads)), wide.num_kv_heads),
        }

    def _heads(self, heads: list[int], count: int) -> Axis:
        """Returns the axis of heads; a pair is an element of a head's first half and the same one of its second."""
        dim, wide_dim = self.narrow.head_dim, self.wide.head_dim
        pairs = torch.arange(dim // 2) * (wide_dim // dim)
        begins = wide_dim * torch.tensor(heads)[:, None]
        places = begins + torch.cat((pairs, pairs + wide_dim // 2))
        return Axis(count * wide_dim, places.flatten(), (begins + torch.arange(wide_dim)).flatten())


def _first(size: int, wide_size: int) -> Axis:
    places = torch.arange(size)
    return Axis(wide_size, places, places)


def _refuse(narrow: ModelConfig, wide: ModelConfig) -> None:
    pairs = {
        "vocab_size": (narrow.vocab_size, wide.vocab_size),
        "hidden_size": (narrow.hidden_size + 1, wide.hidden_size),  # one more carries what padded tokens are known by
        "intermediate_size": (narrow.intermediate_size, wide.intermediate_size),
        "num_layers": (narrow.num_layers, wide.num_layers),
        "num_kv_heads": (narrow.num_kv_heads, wide.num_kv_heads),
        "query heads of a key head": (
            narrow.num_heads // narrow.num_kv_heads,
            wide.num_heads // wide.num_kv_heads,
        ),
        "head_dim": (narrow.head_dim, wide.head_dim),
    }
    for name, (least, held) in pairs.items():
        if held < least:
            raise ValueError(f"{name} of the wide model is {held}, and must be {least} or more")
    if wide.head_dim % narrow.head_dim:
        raise ValueError(f"head_dim {wide.head_dim} is no multiple of {narrow.head_dim}")
    if narrow.rope.kind != "default" or narrow.rope != wide.rope:
        raise ValueError(f"frequencies differ: {narrow.rope} and {wide.rope}")
    for model in (narrow, wide):
        if model.has_qk_norm or model.has_qkv_bias or model.has_out_bias or model.has_mlp_bias or model.experts:
            raise ValueError(f"{model.architecture} has more than the matrices and norms of a plain Llama")

"""How large a widened model is, as a sum; nothing is allocated."""

from __future__ import annotations

import math

from benchmarks.widen.heads import WideHead
from benchmarks.widen.target import SHARD_BYTES, Widened, pieces_of
from hiserve.models.names import parameter_table


def target_bytes(widened: Widened, element: int) -> dict[str, int]:
    """Returns bytes by part, of elements of ``element`` bytes."""
    num_nano, num_layers = len(widened.places.layers), widened.config.num_layers
    layer = sum(math.prod(piece.shape) for piece in pieces_of(widened.config) if ".layers.0." in piece.source)
    rest = sum(math.prod(piece.shape) for piece in pieces_of(widened.config) if ".layers." not in piece.source)
    return {
        "layers that compute": num_nano * layer * element,
        "extra layers": (num_layers - num_nano) * layer * element,
        "embedding, norm and head": rest * element,
    }


def largest_bytes(widened: Widened, element: int) -> int:
    """Returns the bytes of the largest parameter: what is alive on the device, at most, while a folder is written."""
    table = parameter_table(widened.config).values()
    return element * max(sum(math.prod(piece.shape) for piece in pieces) for pieces in table)


def head_bytes(head: WideHead, element: int) -> int:
    """Returns the bytes of a draft head."""
    return element * sum(math.prod(shape) for shape in head.shapes.values())


def plan_target(widened: Widened, element: int) -> list[str]:
    """Returns the plan of the target, a line an item."""
    parts = target_bytes(widened, element)
    lines = [f"{name:28} {_gib(num_bytes)}" for name, num_bytes in parts.items()]
    return [
        *lines,
        f"{'parameters, in one copy':28} {_gib(sum(parts.values()))}",
        f"{'largest parameter':28} {_gib(largest_bytes(widened, element))}",
        f"{'host, while files are written':28} {_gib(min(SHARD_BYTES, sum(parts.values())))}",
    ]


def plan_head(name: str, head: WideHead, element: int) -> str:
    """Returns the plan of a draft head, in one line."""
    return f"{'head ' + name:28} {_gib(head_bytes(head, element))}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:8.3f} GiB"

"""What the user left open: sizes of a load that fit the model's context, and a minute where the model runs on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from hiserve.bench.options import FITTING, CacheLoadOptions, DataOptions, MultiturnOptions, OfflineOptions

_T = TypeVar("_T", DataOptions, MultiturnOptions, OfflineOptions, CacheLoadOptions)
Sizes = Mapping[str, int]

# By section: sizes for accelerators, and for a CPU.
SIZES: dict[type[msgspec.Struct], dict[str, tuple[int, int]]] = {
    DataOptions: {
        "num_prompts": (1000, 64),
        "input_length": (1024, 128),
        "output_length": (1024, 64),
        "num_groups": (64, 8),
        "prompts_per_group": (16, 8),
        "system_length": (2048, 512),
        "question_length": (128, 32),
    },
    MultiturnOptions: {
        "num_clients": (80, 8),
        "num_rounds": (10, 4),
        "request_length": (2048, 256),
        "output_length": (1, 8),
    },
    OfflineOptions: {"num_prompts": (256, 64), "input_length": (1024, 128), "output_length": (128, 64)},
    CacheLoadOptions: {
        "num_conversations": (32, 16),
        "group_size": (4, 4),
        "num_rounds": (4, 3),
        "conversation_length": (6144, 512),
        "request_length": (256, 64),
        "num_prefixes": (64, 8),
        "suffixes_per_prefix": (16, 8),
        "prefix_length": (2048, 512),
        "suffix_length": (128, 32),
        "output_length": (16, 16),
    },
}
SHARED_PREFIX_OUTPUT = 256


def filled(options: _T, *, device: str | None, max_model_len: int | None) -> _T:
    """Returns the options with a size in each place that the user left open.

    Lengths that the user left open shrink, all by one factor, until the longest request fits the context; lengths
    that were given stay as they are.
    """
    if _is_recorded(options):
        return options
    sizes = _sizes(options, device == "cpu")
    given = {name: value for name in sizes if (value := getattr(options, name)) not in (None, FITTING)}
    free_sizes = {name: size for name, size in sizes.items() if name not in given}
    weights = _weights(options, {**free_sizes, **given})
    if max_model_len is not None:
        used = sum(math.ceil(weight * given.get(name, 1)) + weight % 1 for name, weight in weights.items())
        wanted = sum(weight * (free_sizes[name] - 1) for name, weight in weights.items() if name in free_sizes)
        factor = min(1.0, max(0.0, max_model_len - used) / max(wanted, 1e-9))
        free_sizes |= {name: 1 + int((free_sizes[name] - 1) * factor) for name in weights if name in free_sizes}
    return msgspec.structs.replace(options, **free_sizes)


def chosen(size: int | None) -> int:
    """Returns a size that ``filled`` has filled in."""
    assert size, f"a size is still {size}: the options were not filled in"
    return size


def _is_recorded(options: msgspec.Struct) -> bool:
    if isinstance(options, DataOptions):
        return options.dataset not in ("random", "shared-prefix")
    return isinstance(options, CacheLoadOptions) and options.load in ("conversation-trace", "agent-sessions")


def _sizes(options: msgspec.Struct, is_small: bool) -> Sizes:
    sizes = {name: both[is_small] for name, both in SIZES[type(options)].items()}
    if isinstance(options, DataOptions) and options.dataset == "shared-prefix":
        del sizes["num_prompts"]  # all there are
        sizes["output_length"] = min(SHARED_PREFIX_OUTPUT, sizes["output_length"])
    return sizes


def _weights(options: msgspec.Struct, sizes: Sizes) -> dict[str, float]:
    """Returns how often each length counts in the longest request."""
    if isinstance(options, MultiturnOptions):
        return dict.fromkeys(("request_length", "output_length"), float(sizes["num_rounds"]))
    if isinstance(options, CacheLoadOptions):
        rounds, scale = sizes["num_rounds"], options.length_scale
        if options.load == "multi-turn":
            lengths = {"conversation_length": scale, "request_length": (rounds - 1) * scale}
            return lengths | {"output_length": float(rounds)}
        return {"prefix_length": scale, "suffix_length": scale, "output_length": 1.0}
    assert isinstance(options, DataOptions | OfflineOptions), f"sizes of {options} have no weights"
    if isinstance(options, DataOptions) and options.dataset == "shared-prefix":
        return dict.fromkeys(("system_length", "question_length", "output_length"), 1.0)
    # Random lengths are rounded up at the far end of their range.
    return dict.fromkeys(("input_length", "output_length"), 1.0 + options.random_range_ratio)

"""The groups of rows that compressed attention stores (DeepSeek-V4), without torch."""

from __future__ import annotations

import math

from hiserve.core.kv_groups import CacheGroupSpec, CachePlan, Space
from hiserve.models.compressed_config import CompressedConfig, LayerKind

PAGE_SIZE = 128
WINDOW = "swa"  # a row per token, of all layers
SPARSE, INDEX, HEAVY = "csa", "csa_index", "hca"  # compressed rows, and the keys by which they are chosen

_GROUPS: dict[LayerKind, tuple[str, ...]] = {LayerKind.SPARSE: (SPARSE, INDEX), LayerKind.HEAVY: (HEAVY,)}


def inputs_of(group: str) -> str:
    """Returns the group of the inputs of which the rows of another are made."""
    return group + "_inputs"


def page_multiple(config: CompressedConfig) -> int:
    """Returns the number of which a page's tokens must be a multiple: no row stands for tokens of two pages."""
    return math.lcm(*config.ratios)


def compressed_page_size(config: CompressedConfig) -> int:
    """Returns the tokens of a page under ``auto``: a page of a window of the released models, and whole rows."""
    multiple = page_multiple(config)
    return -(-PAGE_SIZE // multiple) * multiple


def ratio_elements(config: CompressedConfig) -> tuple[tuple[int, int], ...]:
    """Returns elements of a row of all layers, and the ratio, of each kind of compressed rows."""
    sparse = config.count(LayerKind.SPARSE) * (config.width + config.index_width)
    heavy = config.count(LayerKind.HEAVY) * config.width
    found = ((sparse, config.sparse_ratio), (heavy, config.heavy_ratio))
    return tuple(each for each in found if each[0])


def compressed_plan(config: CompressedConfig, dtype: str, *, frees_windows: bool, max_draft: int) -> CachePlan:
    """Returns the groups of all layers.

    Args:
        config: The shape.
        dtype: Of rows; inputs are at least float32.
        frees_windows: Windows have pages of their own.
        max_draft: Most drafts of a row in a step. Rings have room for those that were refused, and for the step after these.
    """
    counts = {kind: config.count(kind) for kind in LayerKind}
    groups = [
        CacheGroupSpec(
            name=WINDOW,
            num_layers=len(config.kinds),
            num_kv_heads=1,
            head_dim=config.width,
            dtype=dtype,
            codec="latent",
            value_dim=config.width,
            space=Space.WINDOW if frees_windows else Space.HISTORY,
        )
    ]
    wide = "float64" if dtype == "float64" else "float32"
    for name, kind, width, num_series in (
        (SPARSE, LayerKind.SPARSE, config.width, 2),
        (INDEX, LayerKind.SPARSE, config.index_width, 2),
        (HEAVY, LayerKind.HEAVY, config.width, 1),
    ):
        if not counts[kind]:
            continue
        ratio = config.sparse_ratio if kind is LayerKind.SPARSE else config.heavy_ratio
        rows = CacheGroupSpec(
            name=name,
            num_layers=counts[kind],
            num_kv_heads=1,
            head_dim=width,
            dtype=dtype,
            codec="latent",
            value_dim=width,
            ratio=ratio,
        )
        # A resume at a boundary that all ratios divide reads the first series of the last row's tokens, or nothing.
        inputs = CacheGroupSpec(
            name=inputs_of(name),
            num_layers=counts[kind],
            num_kv_heads=1,
            head_dim=2 * num_series * width,
            dtype=wide,
            codec="inputs",
            space=Space.ROW,
            ring=num_series * ratio + 2 * (1 + max_draft),
            snapshot_rows=ratio if num_series > 1 else 0,
        )
        groups += [rows, inputs]
    layers, beside, places = [], [], dict.fromkeys(LayerKind, 0)
    for layer, kind in enumerate(config.kinds):
        layers.append((WINDOW, layer))
        names = _GROUPS.get(kind, ())
        beside.append(tuple((each, places[kind]) for name in names for each in (name, inputs_of(name))))
        places[kind] += 1
    return CachePlan(
        groups=tuple(groups),
        layers=tuple(layers),
        beside=tuple(beside),
        window=config.window if frees_windows else 0,
    )

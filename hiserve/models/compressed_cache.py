"""The groups of rows that compressed attention stores (DeepSeek-V4), without torch."""

from __future__ import annotations

import math

import msgspec

from hiserve.core.kv_groups import CacheGroupSpec, CachePlan, Space
from hiserve.core.row_shapes import PackedShape
from hiserve.core.step_memory import StoredBytes
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


def packed_bytes(config: CompressedConfig | None) -> StoredBytes | None:
    """Returns bytes of packed rows of all layers; None if there are none, or they cannot be packed."""
    if config is None:
        return None
    row, key, num_sparse = config.packed_row, config.packed_key, config.count(LayerKind.SPARSE)
    if row is None or (key is None and num_sparse):
        return None
    sparse = num_sparse * (row.row_bytes + key.row_bytes) if key is not None else 0
    found = ((sparse, config.sparse_ratio), (config.count(LayerKind.HEAVY) * row.row_bytes, config.heavy_ratio))
    token = len(config.kinds) * row.row_bytes
    return StoredBytes(token=token, window=token, ratios=tuple(each for each in found if each[0]))


def _rows(name: str, num_layers: int, width: int, dtype: str, packed: PackedShape | None) -> CacheGroupSpec:
    """Returns a group of rows of ``width`` elements, or of packed ones."""
    size = width if packed is None else packed.row_bytes
    return CacheGroupSpec(
        name=name,
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=size,
        dtype=dtype if packed is None else "uint8",
        codec="latent" if packed is None else "packed",
        value_dim=size,
    )


def compressed_plan(
    config: CompressedConfig, dtype: str, *, frees_windows: bool, max_draft: int, packs_rows: bool
) -> CachePlan:
    """Returns the groups of all layers.

    Args:
        config: The shape.
        dtype: Of rows that are not packed; inputs are at least float32.
        frees_windows: Windows have pages of their own.
        max_draft: Most drafts of a row in a step. Rings have room for those that were refused, and for the step after these.
        packs_rows: Rows are packed.
    """
    assert not packs_rows or packed_bytes(config) is not None, "these rows cannot be packed"
    row, key = (config.packed_row, config.packed_key) if packs_rows else (None, None)
    counts = {kind: config.count(kind) for kind in LayerKind}
    windows = _rows(WINDOW, len(config.kinds), config.width, dtype, row)
    groups = [msgspec.structs.replace(windows, space=Space.WINDOW if frees_windows else Space.HISTORY)]
    wide = "float64" if dtype == "float64" else "float32"
    for name, kind, width, packed, num_series in (
        (SPARSE, LayerKind.SPARSE, config.width, row, 2),
        (INDEX, LayerKind.SPARSE, config.index_width, key, 2),
        (HEAVY, LayerKind.HEAVY, config.width, row, 1),
    ):
        if not counts[kind]:
            continue
        ratio = config.sparse_ratio if kind is LayerKind.SPARSE else config.heavy_ratio
        rows = msgspec.structs.replace(_rows(name, counts[kind], width, dtype, packed), ratio=ratio)
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

"""The rows that latent attention stores, and the bytes of packed ones, without torch."""

from __future__ import annotations

from hiserve.core.kv_groups import CacheGroupSpec
from hiserve.core.step_memory import StoredBytes
from hiserve.models.index_config import IndexConfig
from hiserve.models.latent_config import LatentConfig


def latent_group(config: LatentConfig, num_layers: int, dtype: str, *, packs_rows: bool) -> CacheGroupSpec:
    """Returns the group of rows, stored as ``dtype``, or packed."""
    row = config.packed_row if packs_rows else None
    assert row is not None or not packs_rows, f"latents of {config.rank} numbers cannot be packed"
    return CacheGroupSpec(
        name="kv",
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=config.width if row is None else row.row_bytes,
        dtype=dtype if row is None else "uint8",
        codec="latent" if row is None else "packed",
        value_dim=config.rank if row is None else row.row_bytes,
    )


def packed_bytes(config: LatentConfig, index: IndexConfig | None, num_layers: int) -> StoredBytes | None:
    """Returns the bytes of packed rows and keys of all layers; None if either cannot be packed."""
    row, keys = config.packed_row, 0
    if index is not None:
        key = index.packed_key
        if key is None:
            return None
        keys = len(index.layers) * key.row_bytes
    return None if row is None else StoredBytes(token=num_layers * row.row_bytes + keys)

"""What copies pages between tiers on each kind of device."""

from __future__ import annotations

import importlib

import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.pinning import CudaRegistrar
from hiserve.cache.storage.prefault import Registrar
from hiserve.cache.storage.transfer import TransferEngine

# The one table that turns a device into its engine: module and class. Those of CUDA need Triton.
_ENGINES = {
    "cpu": ("hiserve.cache.storage.transfer", "ThreadTransfers"),
    "cuda": ("hiserve.cache.storage.cuda_transfer", "CudaTransfers"),
}
# Stores give way to everything else: what waits beyond this is dropped, and counted. Between the least and the most it is
# a share of the device pool: pages on their way to the host are locked until they are there, so that this bounds what
# eviction cannot have. The most holds what a few steps of prompts write, 0.94 GB each on an H200 with a model of 0.6B; the
# least has room for a long order where the pool is small.
_LEAST_QUEUED_STORE_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
_MAX_QUEUED_STORE_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
_QUEUED_SHARE = 8  # one in so many bytes of the pool
_MAX_STORE_BYTES_PER_S = {"cpu": 4e9, "cuda": 20e9}


def make_registrar(device: str) -> Registrar | None:
    """Returns what pins host memory for a device, ``cpu`` or ``cuda``; None where nothing must."""
    return CudaRegistrar(torch.cuda.current_device()) if device == "cuda" else None


def make_transfers(device: str, pool: DevicePool, host: HostPool) -> TransferEngine:
    """Returns the engine between both pools; close it before them.

    Args:
        device: ``cpu`` or ``cuda``; there the current device is that of the pool.
        pool: On the device.
        host: With the registrar of the device.
    """
    module, name = _ENGINES[device]
    make = getattr(importlib.import_module(module), name)
    engine: TransferEngine = make(
        pool,
        host,
        max_queued_bytes=_max_queued_bytes(device, pool),
        max_store_bytes_per_s=_MAX_STORE_BYTES_PER_S[device],
    )
    return engine


def _max_queued_bytes(device: str, pool: DevicePool) -> int:
    share = pool.num_bytes // _QUEUED_SHARE
    return max(_LEAST_QUEUED_STORE_BYTES[device], min(_MAX_QUEUED_STORE_BYTES[device], share))

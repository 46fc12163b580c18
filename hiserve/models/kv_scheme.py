"""What ``quantization_config`` of a checkpoint says of keys and values, without torch."""

from __future__ import annotations

from typing import Any


def asks_for_packed(given: Any) -> bool:
    """Whether a checkpoint was made for keys and values in E4M3; ``given`` is its ``quantization_config``.

    ``kv_cache_scheme`` is of compressed-tensors and ModelOpt, ``kv_cache_quant_algo`` of ModelOpt. Their scales, one of all
    tokens, are not read: each token has its own. Other schemes are no reason to round, as wider numbers lose nothing.
    """
    if not isinstance(given, dict):
        return False
    scheme, algorithm = given.get("kv_cache_scheme"), given.get("kv_cache_quant_algo")
    if isinstance(algorithm, str):
        return algorithm.upper() == "FP8"
    return isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"

"""What an engine in this process holds in its device's pages, by the tokens that lead to each."""

from __future__ import annotations

from typing import Any

import numpy as np

from hiserve import LLM
from hiserve.cache.index.radix import Node
from hiserve.core.forward import LayerKV
from tests.helpers.tiered import cache_of, engine_of

Prefix = tuple[int, ...]
Pages = dict[Prefix, bytes]


def target_pages(llm: LLM) -> Pages:
    """Returns keys and values of the model, of every page that the index has on the device."""
    return _pages(llm, [plane for layer in _runners(llm)._eager._layers for plane in _planes(layer, llm)])


def draft_pages(llm: LLM) -> Pages:
    """Returns what the head keeps: its keys and values, and what the model showed of each page's last token."""
    pool = _runners(llm)._proposer._pool
    planes = [plane for layer in pool.layers for plane in _planes(layer, llm)]
    return _pages(llm, [*planes, pool.page_hidden.numpy()])


def _runners(llm: LLM) -> Any:
    return engine_of(llm)._executor._runners  # type: ignore[attr-defined]


def _planes(layer: LayerKV, llm: LLM) -> list[np.ndarray]:
    return [each.reshape(-1, llm.config.cache.page_size, *each.shape[1:]).numpy() for each in (layer.k, layer.v)]


def _pages(llm: LLM, planes: list[np.ndarray]) -> Pages:
    found: Pages = {}
    for node in cache_of(llm).tree.nodes():
        tokens = _tokens(node)
        start = len(tokens) - node.num_pages * llm.config.cache.page_size
        for index, page in enumerate(node.pages.tolist()):
            end = start + (index + 1) * llm.config.cache.page_size
            held = b"".join(plane[page].tobytes() for plane in planes)
            assert found.setdefault(tokens[:end], held) == held, f"two pages of {tokens[:end]} differ"
    return found


def _tokens(node: Node) -> Prefix:
    key = b""
    step: Node | None = node
    while step is not None:
        key, step = step.key + key, step.parent
    return tuple(np.frombuffer(key, dtype=np.int32).tolist())

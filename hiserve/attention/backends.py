"""The table of attention backends, their limits, and the choice among them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from hiserve.attention.base import Attention, AttentionShape, LaterAttention, is_hopper
from hiserve.attention.indexed import ChosenOps, IndexedAttention
from hiserve.attention.latent import ExpandedPrompts, open_with
from hiserve.attention.paired import GraphedAttention, PairedAttention
from hiserve.attention.union import UnionAttention
from hiserve.errors import ConfigError

logger = logging.getLogger(__name__)

# Module and class that compute expanded prompts of latent attention on Hopper, and the elements of keys and values it has.
_PROMPTS = ("hiserve.attention.flashinfer_latent", "FlashInferPrompts")
_PROMPT_DIMS = ((192, 128), (256, 256))
_CHOSEN = "hiserve.kernels.chosen_reference"
# Heads times rows from which graphs of absorbed queries are FlashInfer's. On an H200, rows of 8,192 tokens with 20 heads take
# 23 us with both kernels if there is one, 27 and 49 us if there are 4; a row of 1,024 tokens takes 17 us, and Triton's 11.
_MIN_QUERIES = 80


@dataclass(frozen=True, slots=True)
class _Backend:
    """The class of a backend, which takes an ``AttentionShape``, and its limits."""

    module: str  # imported when the backend is opened
    name: str
    devices: tuple[str, ...] = ("cuda",)  # supported device types
    package: str | None = None  # a package it needs beyond hiserve's own requirements
    head_dims: tuple[int, ...] | None = None  # supported sizes; None is any
    dtypes: tuple[torch.dtype, ...] | None = None  # supported types; None is any
    max_group: int | None = None  # most query heads of one KV head; None is any
    has_sinks: bool = True  # supports ``AttentionShape.sinks``
    has_hidden_first: bool = True  # supports ``AttentionShape.hides_first``
    has_packed_rows: bool = True  # supports ``AttentionShape.packs_rows``
    has_trees: bool = True  # supports ``ForwardInputs.tree_mask``
    # Module and class that compute absorbed queries of ``AttentionShape.latent``; None has no latent attention.
    absorbed: tuple[str, str] | None = None
    # Module and class of ``AttentionShape.segment``, for causal masks; None has no such order.
    exact: tuple[str, str] | None = None
    chosen: str | None = None  # module that chooses rows and attends to these (``IndexedAttention``); None has none
    # Least elements of latents, rotated keys and keys of an index, which are powers of 2 if it is more.
    min_latent: int = 1
    latent_dims: tuple[int, int] | None = None  # the elements of latents and rotated keys that it supports; None is any
    latent_heads: int = (
        0  # query heads of latent attention divide it, except in graphs of rows of one token; 0 is any number
    )
    has_device_lengths: bool = True  # needs no lengths from the host: the class has ``needs_host_lengths`` False

    def refusal(self, shape: AttentionShape, device: torch.device, has_trees: bool) -> str | None:
        """Returns why it does not support these arguments, as the end of a sentence; None if it does."""
        if (absence := self.absence(shape, device)) is not None:
            return absence
        if (misfit := self._misfit(shape) if shape.latent is None else self._latent_misfit(shape)) is not None:
            return misfit
        features = {
            "attention sinks": (any(sink is not None for sink in shape.sinks), self.has_sinks),
            "hidden first positions": (shape.hides_first, self.has_hidden_first),
            f"{'latents' if shape.latent else 'keys and values'} in 8 bits": (
                shape.packs_rows,
                self.has_packed_rows and shape.segment is None,
            ),
            "tree masks": (has_trees, self.has_trees and shape.segment is None),
            "sums in one order": (shape.segment is not None, self.exact is not None and shape.latent is None),
            "latent attention": (shape.latent is not None, self.absorbed is not None),
            "attention to chosen tokens": (shape.index is not None, self.chosen is not None),
        }
        lacks = [name for name, (is_needed, is_there) in features.items() if is_needed and not is_there]
        return f"has no {' and no '.join(lacks)}" if lacks else None

    def absence(self, shape: AttentionShape, device: torch.device) -> str | None:
        """As ``refusal``, whatever the sizes."""
        if device.type not in self.devices:
            return f"does not run on {device.type}"
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"needs the package {self.package}, which is not installed"
        if self.dtypes is not None and shape.dtype not in self.dtypes:
            return f"does not compute in {_name(shape.dtype)}, only in {' and '.join(map(_name, self.dtypes))}"
        return None

    def _misfit(self, shape: AttentionShape) -> str | None:
        if self.head_dims is not None and shape.head_dim not in self.head_dims:
            return f"has no heads of {shape.head_dim} elements, only of {', '.join(map(str, self.head_dims))}"
        group = shape.num_heads // shape.num_kv_heads
        if self.max_group is not None and group > self.max_group:
            return f"has at most {self.max_group} query heads for each KV head; the model has {group}"
        return None

    def _latent_misfit(self, shape: AttentionShape) -> str | None:
        assert shape.latent is not None
        sizes = (shape.latent.rank, shape.latent.rope_dim)
        if self.min_latent > 1 and not all(_is_power(size, self.min_latent) for size in sizes):
            return f"has no latents or rotated keys but of powers of 2 from {self.min_latent} on"
        if self.min_latent > 1 and shape.index is not None and not _is_power(shape.index.width, self.min_latent):
            return f"has no keys of an index but of powers of 2 from {self.min_latent} on"
        if self.latent_dims not in (None, sizes):
            return f"has latents and rotated keys of {self.latent_dims} elements, not of {sizes}"
        if self.latent_heads % shape.num_heads:
            return (
                f"has latent attention for numbers of heads that divide {self.latent_heads}, not for {shape.num_heads}"
            )
        return None

    def class_for(self, shape: AttentionShape) -> Any:
        """Imports the class that computes heads in groups, or absorbed queries."""
        module, name = self.absorbed if shape.latent and self.absorbed else (self.module, self.name)
        if shape.segment is not None and self.exact is not None:
            module, name = self.exact
        return getattr(importlib.import_module(module), name)

    def open(self, shape: AttentionShape) -> Attention:
        """Imports the module and creates the backend."""
        plain = open_with(shape, self.class_for(shape))
        return plain if shape.index is None else self.indexed(shape, plain)

    def indexed(self, shape: AttentionShape, plain: Attention) -> Attention:
        """Imports what attends to chosen rows, beside ``plain`` for steps whose rows are all chosen."""
        assert self.chosen is not None, self.name
        return IndexedAttention(shape, plain, cast(ChosenOps, importlib.import_module(self.chosen)))


# In order of preference: the error of one backend names the first other one that supports the arguments.
_BACKENDS = {
    "triton": _Backend(
        "hiserve.attention.triton",
        "TritonAttention",
        exact=("hiserve.attention.exact_triton", "ExactTritonAttention"),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        package="triton",
        max_group=128,
        absorbed=("hiserve.attention.latent_triton", "TritonLatentAttention"),
        chosen="hiserve.kernels.chosen_triton",
        min_latent=16,
    ),
    "flashinfer": _Backend(
        "hiserve.attention.flashinfer",
        "FlashInferAttention",
        package="flashinfer",
        head_dims=(64, 128, 256),
        dtypes=(torch.bfloat16, torch.float16),
        max_group=16,
        has_sinks=False,
        has_hidden_first=False,
        has_packed_rows=False,
        has_trees=False,
        has_device_lengths=False,
        absorbed=("hiserve.attention.flashinfer_latent", "FlashInferLatentAttention"),
        latent_dims=(512, 64),
        latent_heads=128,
    ),
    "cpu": _Backend(
        "hiserve.attention.cpu",
        "CpuAttention",
        exact=("hiserve.attention.cpu", "ExactCpuAttention"),
        devices=("cpu",),
        has_hidden_first=False,
        absorbed=("hiserve.attention.cpu", "CpuAttention"),
        chosen=_CHOSEN,
    ),
    "reference": _Backend(
        "hiserve.attention.reference_attention",
        "ReferenceAttention",
        devices=("cpu", "cuda"),
        absorbed=("hiserve.attention.reference_attention", "ReferenceAttention"),
        chosen=_CHOSEN,
    ),
}


def open_attention(
    name: str,
    shape: AttentionShape,
    device: torch.device,
    *,
    has_trees: bool = False,
    has_drafts: bool = True,
    is_serving: Callable[[], bool] | None = None,
) -> Attention:
    """Creates a backend.

    Args:
        name: ``auto``, ``triton``, ``flashinfer``, ``cpu`` or ``reference``.
        shape: Of the model.
        device: Of the pool.
        has_trees: Steps may have tree masks.
        has_drafts: Rows may have drafts, so that the host may know bounds of their lengths alone. Without them ``auto`` may
            return a backend that needs exact ones.
        is_serving: Whether steps are those of requests. If given, ``auto`` does not wait for compilers: Triton computes
            the prompts until FlashInfer is compiled and ``is_serving`` is true, then FlashInfer does.

    Raises:
        ConfigError: The backend is not installed or does not support the arguments; the message names one that does.
    """
    if shape.is_union:
        return _open_union(name, shape)
    if name == "auto":
        return _open_fastest(shape, device, is_serving, has_trees=has_trees, has_drafts=has_drafts)
    backend = _BACKENDS[name]
    refusal = backend.refusal(shape, device, has_trees)
    if refusal is not None:
        would_do = fitting_backends(shape, device, has_trees=has_trees)[0]
        raise ConfigError(
            f"the attention backend {name} {refusal}. Use {would_do}: --attention-backend {would_do}.",
            param="attention_backend",
        )
    return backend.open(shape)


def _open_union(name: str, shape: AttentionShape) -> Attention:
    """Opens the only backend of several groups of rows."""
    if name not in ("auto", "reference"):
        raise ConfigError(
            f"the attention backend {name} does not support compressed rows. Leave --attention-backend out.",
            param="attention_backend",
        )
    return UnionAttention(shape)


def open_draft_attention(
    name: str, shape: AttentionShape, device: torch.device, *, has_trees: bool = False
) -> Attention:
    """Creates the backend of drafts: the model's, or the best one that reads lengths on the device.

    Drafts need such a backend because only the device knows how many tokens were accepted. If the backend ``name``
    lacks this, or does not support the head's shape, that is no error: there is no other setting for drafts, no token
    depends on the backend of drafts, and an error would deny the model a backend that suits it. A warning is logged
    once.
    """
    if shape.is_union:
        return UnionAttention(shape)
    named = _BACKENDS.get(name)
    refusal = None if named is None else named.refusal(shape, device, has_trees)
    if named is not None and refusal is None and named.has_device_lengths:
        return named.open(shape)
    fits = fitting_backends(shape, device, has_trees=has_trees)
    best = next(fit for fit in fits if _BACKENDS[fit].has_device_lengths)
    if named is not None:
        why = refusal or "needs lengths from the host, which knows only later how many drafts were accepted"
        logger.warning("drafts attend with %s: the attention backend %s %s", best, name, why)
    return _BACKENDS[best].open(shape)


def _open_fastest(
    shape: AttentionShape,
    device: torch.device,
    is_serving: Callable[[], bool] | None,
    *,
    has_trees: bool,
    has_drafts: bool,
) -> Attention:
    """Opens the fastest supported backend, or a pair of backends, each for the rows where it is faster.

    The choice is fixed; nothing is measured here. Triton computes rows that decode, though its kernels are slower: on
    an H200 (``benchmarks/results/attention.json``, at 7fa9001) FlashInfer's took between 0.77 and 1.18 of their time,
    less in six of eight shapes, and 0.72 where 8 rows verified 4 tokens. But FlashInfer makes a schedule on the host
    before each step, from host lengths: with drafts no step could be planned ahead (``engine/build.py``), and rows that
    decode beside prompts would have no graph (``ragged``). ``choices`` in that file has the cost of a
    schedule for each shape. FlashInfer's kernels for Hopper compute prompts in 0.73 to 0.91 of Triton's time at each of
    the shapes measured. Of ``_MIN_QUERIES`` absorbed queries and more FlashInfer's kernel takes 0.38 to 0.8 of Triton's time
    (``hybrid_kernel.json``; as long at 8 rows of 1,024 tokens with 20 heads), so that without drafts it computes graphs of
    rows that decode.
    """
    fits = fitting_backends(shape, device, has_trees=has_trees)
    if shape.index is not None:
        # Few graphs are of rows that see no more tokens than are chosen: none has a schedule that the host makes.
        plain = _open_fastest(replace(shape, index=None), device, is_serving, has_trees=has_trees, has_drafts=True)
        return _BACKENDS[fits[0]].indexed(shape, plain)
    make: Callable[[AttentionShape], Attention] = _BACKENDS[fits[0]].class_for(shape)
    has_prompts = fits[0] != "flashinfer" and "flashinfer" in fitting_backends(shape, device)  # prompts have no trees
    has_graphs = _has_graphs(shape, device, has_trees or has_drafts)
    if (has_prompts or has_graphs) and is_hopper(device):
        make = partial(
            _open_pair, shape, decoding=fits[0], has_prompts=has_prompts, has_graphs=has_graphs, is_serving=is_serving
        )
    return open_with(shape, make, _open_prompts(shape, device, is_serving))


class _ServedPrompts:
    """A kernel that takes prompts of requests only: until then it may be compiling."""

    def __init__(self, kernel: ExpandedPrompts, is_serving: Callable[[], bool]) -> None:
        self.plan, self.attend = kernel.plan, kernel.attend
        self._kernel, self._is_serving = kernel, is_serving

    def is_ready(self) -> bool:
        return self._is_serving() and self._kernel.is_ready()


def _open_prompts(
    shape: AttentionShape, device: torch.device, is_serving: Callable[[], bool] | None
) -> ExpandedPrompts | None:
    """Opens FlashInfer's kernel of expanded prompts, if it fits and can be compiled.

    On an H200 torch's kernel runs at 290 TFLOP/s with the heads of GLM-4.7-Flash, and 264 with those of DeepSeek-V3.
    """
    latent = shape.latent
    if latent is None or (latent.nope_dim + latent.rope_dim, latent.value_dim) not in _PROMPT_DIMS:
        return None
    if _BACKENDS["flashinfer"].absence(shape, device) is not None or not is_hopper(device):
        return None
    try:
        kernel_class = getattr(importlib.import_module(_PROMPTS[0]), _PROMPTS[1])
        kernel: ExpandedPrompts = kernel_class(shape, waits=is_serving is None)
    except (ConfigError, ImportError) as error:
        logger.warning("expanded prompts are computed by torch, which is slower: %s", error)
        return None
    return kernel if is_serving is None or kernel.is_ready() else _ServedPrompts(kernel, is_serving)


def _has_graphs(shape: AttentionShape, device: torch.device, has_drafts: bool) -> bool:
    """Whether FlashInfer computes graphs of rows that decode, for which any number of latent attention's heads will do."""
    if shape.latent is None or has_drafts:
        return False
    return _BACKENDS["flashinfer"].refusal(replace(shape, num_heads=1), device, False) is None


def _open_pair(
    shape: AttentionShape,
    kind: AttentionShape,
    *,
    decoding: str,
    has_prompts: bool,
    has_graphs: bool,
    is_serving: Callable[[], bool] | None,
) -> Attention:
    """Opens ``decoding`` and, if it can be compiled, FlashInfer beside it, for prompts, for graphs or for both.

    ``kind`` is what they compute of ``shape``.
    """
    fastest: Attention = _BACKENDS[decoding].class_for(shape)(kind)
    try:
        flashinfer: LaterAttention = _BACKENDS["flashinfer"].class_for(shape)(kind, waits=is_serving is None)
    except (ConfigError, ImportError) as error:
        what = "prompts" if has_prompts else "rows that decode"
        logger.warning("%s are computed by %s, which is slower: %s", what, decoding, error)
        return fastest
    if has_graphs:
        fastest = GraphedAttention(fastest, flashinfer, min_rows=-(-_MIN_QUERIES // shape.num_heads))
    if not has_prompts:
        return fastest
    if is_serving is None or flashinfer.is_ready():
        return PairedAttention(fastest, flashinfer)
    return PairedAttention(fastest, flashinfer, lambda: is_serving() and flashinfer.is_ready())


def fitting_backends(shape: AttentionShape, device: torch.device, *, has_trees: bool = False) -> tuple[str, ...]:
    """Returns the installed backends that support the arguments, best first; the reference always does."""
    fits = tuple(name for name, backend in _BACKENDS.items() if backend.refusal(shape, device, has_trees) is None)
    assert fits, f"no attention backend for {device}"
    return fits


def _is_power(size: int, least: int) -> bool:
    """Whether a size is a power of 2, and no smaller."""
    return size >= least and not size & (size - 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

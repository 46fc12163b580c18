"""Compiles kernels in parallel: a dry run launches none, and other threads compile every kernel that it calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import JITFunction

_LOCK = threading.Lock()  # the replaced method is the library's, shared by every engine of the process

_aten = torch.ops.aten
_EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills new tensors with zeros: unwritten memory may be read as an index, and 0 is valid in every table."""


def _dispatch(mode: TorchDispatchMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    out = func(*args, **kwargs or {})
    return out.zero_() if func in _EMPTY else out


# Set here: torch wraps a method defined in the class, and the wrapper imports torch's compiler, which takes seconds.
_Zeros.__torch_dispatch__ = _dispatch  # type: ignore[method-assign]


@contextmanager
def compiled_side_by_side(num_threads: int) -> Iterator[list[str]]:
    """Within this context, this thread launches no Triton kernel; other threads compile each. The exit waits for all.

    Yields the names of the kernels that were in no cache, complete at the end.

    The values that the body computes are meaningless. Compilers work without the GIL. Compiled kernels are in Triton's
    caches, of the process and on disk. A kernel that cannot be compiled is skipped; its first launch raises the error.
    """
    launch, this_thread, listener = JITFunction.run, threading.get_ident(), knobs.compilation.listener
    compiled: list[str] = []

    def note(*, src: Any, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)
        if listener is not None:
            listener(src=src, cache_hit=cache_hit, **more)

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        if threading.get_ident() != this_thread:
            return launch(kernel, *args, grid=grid, warmup=warmup, **settings)
        made = launch(kernel, *args, grid=grid, warmup=True, **settings)
        future = getattr(made, "future", None)
        if future is not None and future.done() and future.exception() is None:
            made.result()  # puts the kernel into the launch cache
        return None

    with _LOCK, ThreadPoolExecutor(num_threads, "compile") as threads:
        JITFunction.run, knobs.compilation.listener = compile_only, note
        try:
            with triton.AsyncCompileMode(threads, ignore_errors=True), _Zeros():  # type: ignore[no-untyped-call]
                yield compiled
        finally:
            JITFunction.run, knobs.compilation.listener = launch, listener

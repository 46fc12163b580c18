"""Importing this makes the interpreters of all supported versions of Triton agree, and saves most of their time.

A Python bool that is no constant of compilation is an int1, which the interpreters before Triton 3.8 cannot make: it is
refused in every version. The interpreter of Triton 3.6 reads integers from arrays in a way that NumPy 2.4 no longer allows.

Most of an interpreter's time is spent beside the operations of kernels. Here the language is patched once for a process, in place of
once for each launch and for each function that a kernel calls; sums of integers are not repeated in 64 bits for an
overflow check whose result is dropped; and shapes of tensors and types are made once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt
_patch_tensor = interpreter._patch_lang_tensor
_of_numbers = cache(interpreter._get_np_dtype)
_make_type, _make_tensor = tl.block_type.__init__, tl.tensor.__init__


def _convert_but_no_bool(arg: Any) -> Any:
    assert not isinstance(arg, bool), "a kernel's argument is a Python bool; pass an int or a tl.constexpr"
    return _convert(arg)


def _patch_tensor_and_index(tensor: Any, *scope: Any) -> None:
    _patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


interpreter._implicit_cvt = _convert_but_no_bool
interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)
assert not interpreter.interpreter_builder.options.debug, "overflows are asserted"
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


def _get_np_dtype(dtype: Any) -> np.dtype[Any]:
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _of_numbers(dtype.scalar)


def _init_block_type(block: Any, element_ty: Any, shape: Any) -> None:
    fields = _fields_of_type(tuple(shape))
    vars(block).update(fields, element_ty=element_ty, name=f"<{fields['shape']}, {element_ty}>")


def _init_tensor(tensor: Any, handle: Any, type: Any) -> None:
    fields = _fields_of_tensor(type.shape if type.is_block() else ())
    vars(tensor).update(fields, handle=handle, type=type, dtype=type.scalar)


@cache
def _fields_of_type(shape: tuple[Any, ...]) -> dict[str, Any]:
    _make_type(made := tl.block_type.__new__(tl.block_type), tl.int32, list(shape))
    return vars(made)


@cache
def _fields_of_tensor(shape: tuple[int, ...]) -> dict[str, Any]:
    type = tl.block_type(tl.int32, list(shape)) if shape else tl.int32
    _make_tensor(made := tl.tensor.__new__(tl.tensor), None, type)
    return vars(made)


interpreter._get_np_dtype = _get_np_dtype
tl.block_type.__init__ = _init_block_type
tl.tensor.__init__ = _init_tensor


def _multiply_pairs(_: Any, asm: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int) -> Any:
    """Stands for the one instruction in the language of GPUs that kernels have, in float16: two products of each register."""
    assert "fma.rn.f16x2" in asm and constraints == "=h,=h,r,r" and pack == 1 and is_pure, asm
    first, second = (value.data.astype(np.int32).view(np.float16).reshape(*value.data.shape, 2) for value in values)
    products = first * second
    return SimpleNamespace(get_result=lambda i: interpreter.TensorHandle(products[..., i].copy(), tl.float16))


interpreter.InterpreterBuilder.create_inline_asm = _multiply_pairs

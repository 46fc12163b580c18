"""Importing this makes the interpreters of all supported versions of Triton agree.

A Python bool that is no constant of compilation is an int1, which the interpreters before Triton 3.8 cannot make: it is
refused in every version. The interpreter of Triton 3.6 reads integers from arrays in a way that NumPy 2.4 no longer allows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt
_patch_tensor = interpreter._patch_lang_tensor


def _convert_but_no_bool(arg: Any) -> Any:
    assert not isinstance(arg, bool), "a kernel's argument is a Python bool; pass an int or a tl.constexpr"
    return _convert(arg)


def _patch_tensor_and_index(tensor: Any, *scope: Any) -> None:
    _patch_tensor(tensor, *scope)  # what it sets, it also restores
    tensor.__index__ = lambda self: int(self.handle.data.item())


interpreter._implicit_cvt = _convert_but_no_bool
interpreter._patch_lang_tensor = _patch_tensor_and_index


def _multiply_pairs(_: Any, asm: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int) -> Any:
    """Stands for the one instruction in the language of GPUs that kernels have, in float16: two products of each register."""
    assert "fma.rn.f16x2" in asm and constraints == "=h,=h,r,r" and pack == 1 and is_pure, asm
    first, second = (value.data.astype(np.int32).view(np.float16).reshape(*value.data.shape, 2) for value in values)
    products = first * second
    return SimpleNamespace(get_result=lambda i: interpreter.TensorHandle(products[..., i].copy(), tl.float16))


interpreter.InterpreterBuilder.create_inline_asm = _multiply_pairs

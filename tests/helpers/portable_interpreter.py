"""Importing this makes the interpreters of all supported versions of Triton agree.

A Python bool that is no constant of compilation is an int1, which the interpreters before Triton 3.8 cannot make: it is
refused in every version. The interpreter of Triton 3.6 reads integers from arrays in a way that NumPy 2.4 no longer allows.
"""

from __future__ import annotations

from typing import Any

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

"""Launches of Triton kernels that begin while the previous kernel ends.

A kernel launched with ``launch_pdl`` (programmatic dependent launch, on Hopper and later) may begin as soon as
each program of the previous kernel has called ``start_next`` or ended; ``await_previous`` then waits until that kernel
has ended and its writes are visible. This hides the launch and all work before the wait.

The rule that makes it safe: every program of such a kernel calls ``await_previous`` on every path, before its
first store and before its first load of memory that a kernel may have written. Then

- a kernel has ended only when all previous ones have, so awaiting one awaits all of them;
- stores are safe too, also into memory that was freed and reused while an earlier kernel still read it;
- only data that was on the device before the step may be read before the wait: weights. The lookup of embeddings,
  before a step's first layer, is a normal launch, and so has waited for the kernels that wrote the weights.

Other libraries' kernels between ours begin when ours have ended, or wait for that themselves.
"""

from __future__ import annotations

from functools import cache
from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_CAPABILITY = (9, 0)
_PROCESSORS_OF_THE_INTERPRETER = 16


class EarlyLaunch(TypedDict):
    """Keywords of a launch.

    Attributes:
        IS_EARLY: For ``start_next`` and ``await_previous``.
        launch_pdl: Triton's own.
    """

    IS_EARLY: bool
    launch_pdl: bool


@cache
def early_launch(device: torch.device, is_wanted: bool = True) -> EarlyLaunch:
    """Returns keywords of an early launch, if wanted and supported by the device; else those of a normal launch."""
    is_early = is_wanted and device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
    return EarlyLaunch(IS_EARLY=is_early, launch_pdl=is_early)


@cache
def num_processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a device; some number for Triton's interpreter."""
    if device.type != "cuda":
        return _PROCESSORS_OF_THE_INTERPRETER
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def start_next(IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lets the next kernel begin, if it is launched early."""
    if IS_EARLY:
        gdc_launch_dependents()


@triton.jit
def await_previous(IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until the previous kernel has ended."""
    if IS_EARLY:
        gdc_wait()


@triton.jit
def prefetch(pointers):  # type: ignore[no-untyped-def]
    """Brings lines of weights into the device's cache, on a GPU; what reads them does not wait for it."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [pointers], tl.int32, is_pure=False, pack=1
    )

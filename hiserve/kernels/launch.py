"""Launches of Triton kernels that begin while the kernel before them ends.

A kernel that is launched so (``launch_pdl``: programmatic dependent launch, of Hopper and later) may begin as soon as
each program of the kernel before it has called ``start_next`` or ended; ``await_previous`` then waits until that kernel
has ended and what it wrote is visible. What is hidden is the launch, and whatever stands before the wait.

The rule that makes it safe: every program of such a kernel calls ``await_previous`` on every way through, before its
first store and before its first load of anything that a kernel may have written. Then

- a kernel has ended only when all those before it have, so awaiting one is awaiting all of them;
- stores are safe too, also into memory that was freed and taken anew while an earlier kernel still read it;
- only what stood on the device before the step may be read ahead: weights. The lookup of embeddings, before a step's
  first layer, is launched as ever, and so has waited for whatever wrote them.

Kernels of others between ours begin when ours have ended, or wait for that themselves.
"""

from __future__ import annotations

from functools import cache
from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_CAPABILITY = (9, 0)


class EarlyLaunch(TypedDict):
    """Keywords of a launch.

    Attributes:
        IS_EARLY: What the kernel passes to ``start_next`` and ``await_previous``.
        launch_pdl: Triton's own.
    """

    IS_EARLY: bool
    launch_pdl: bool


@cache
def early_launch(device: torch.device, is_wanted: bool = True) -> EarlyLaunch:
    """Returns keywords of a launch that begins early where that is wanted and the device can do it."""
    is_early = is_wanted and device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
    return EarlyLaunch(IS_EARLY=is_early, launch_pdl=is_early)


@triton.jit  # type: ignore[untyped-decorator]
def start_next(IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Lets the next kernel begin, if it is launched early."""
    if IS_EARLY:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def await_previous(IS_EARLY: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Waits until the kernel before has ended."""
    if IS_EARLY:
        gdc_wait()

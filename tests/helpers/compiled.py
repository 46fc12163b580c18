"""Compiles kernels for a GPU that is not there, as the oldest supported Triton does."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import triton.language as tl
from triton import compiler, knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler.code_generator import CodeGenerator
from triton.runtime import JITFunction, driver

from hiserve import kernels
from hiserve.kernels.launch import EarlyLaunch

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024  # of one program on Hopper

# They place barriers and fences, note lines of the source, widen copies, and look for memory that Hopper lacks.
HARMLESS = {
    nvidia.nvidia.passes.ttnvgpuir: (
        "add_check_matmul_two_cta",
        "add_initialize_ws_cluster_barriers",
        "add_interleave_tmem",
        "add_optimize_tmem_layouts",
        "add_proxy_fence_insertion",
        "add_tmem_load_reduce",
    ),
    nvidia.nvidia.passes.ttgpuir: ("add_membar",),
    nvidia.passes.ttgpuir: ("add_coalesce_async_copy",),
    nvidia.passes.llvmir: ("add_di_scope",),
}


class _LoweredError(Exception):
    """Ends a compilation before LLVM's passes and the assembler, the longest parts."""


class _Field(tl.constexpr):  # type: ignore[misc]
    """A number that was read from a named tuple of constants.

    To Triton 3.6 it is a plain number, of which no tuple may be passed to a function that is itself compiled, such as
    ``tl.zeros``, and no bound of ``tl.static_range``; later versions allow both. A name that is annotated as a constant has none.
    """


class Compiled:
    """Kernels that are called, which are compiled up to LLVM's code for their machine and never launched.

    Passes that refuse nothing are left out, those of LLVM among them: they take half of the time.

    Attributes:
        shared_bytes: Shared memory of each variant of a kernel, by module and name.

    Args:
        patch: Puts this into Triton's place.
        known: Shared memory of each source with its constants and options, of which none is compiled twice.
    """

    def __init__(self, patch: pytest.MonkeyPatch, known: dict[tuple[str, str], int]) -> None:
        self.shared_bytes: dict[str, list[int]] = defaultdict(list)
        gpu = SimpleNamespace(
            get_current_target=lambda: HOPPER, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
        launch, call = JITFunction.run, CodeGenerator.call_JitFunction
        lower, translate = compiler.compile, nvidia.llvm.to_module
        read, look_up = CodeGenerator.get_Attribute, CodeGenerator.visit_Name
        count = tl.static_range.__init__

        def translate_only(module: Any, context: Any) -> None:
            translate(module, context)
            raise _LoweredError(module.get_int_attr("ttg.shared"))

        def compile_once(source: Any, target: Any, options: dict[str, Any]) -> None:
            key = source.hash(), repr(sorted(options.items()))
            if key not in known:
                with pytest.raises(_LoweredError) as stopped:
                    lower(source, target=target, options=options)
                known[key] = stopped.value.args[0]
            raise _LoweredError(known[key])

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
            kernel.device_caches.clear()
            with pytest.raises(_LoweredError) as stopped:
                launch(kernel, *args, grid=grid, warmup=True, **settings)
            module = kernel.fn.__module__.removeprefix(f"{kernels.__name__}.")
            self.shared_bytes[f"{module}.{kernel.__name__}"].append(stopped.value.args[0])

        def portable_read(generator: Any, owner: Any, name: str) -> Any:
            value = read(generator, owner, name)
            is_field = isinstance(owner, tl.tuple) and isinstance(value, tl.constexpr)
            return _Field(value.value) if is_field else value

        def portable_name(generator: Any, node: Any) -> Any:
            value = look_up(generator, node)
            return tl.constexpr(value.value) if isinstance(value, _Field) else value

        def portable_call(generator: Any, function: Any, args: Any, kwargs: Any, caller_context: Any = None) -> Any:
            for arg in (*args, *kwargs.values()):
                _refuse_numbers(arg, function)
            return call(generator, function, args, kwargs, caller_context)

        def portable_count(counter: Any, *bounds: Any) -> None:
            assert not any(isinstance(bound, _Field) for bound in bounds), f"a plain number among bounds {bounds}"
            count(counter, *bounds)

        for each in pkgutil.iter_modules(kernels.__path__):
            module = importlib.import_module(f"{kernels.__name__}.{each.name}")
            if hasattr(module, "early_launch"):
                patch.setattr(module, "early_launch", lambda *_: EarlyLaunch(IS_EARLY=True, launch_pdl=True))
        patch.setattr(driver, "_active", gpu)
        patch.setattr(knobs.compilation, "always_compile", True)
        patch.setattr(knobs.compilation, "store_binary_only", True)
        _leave_out(patch)
        patch.setattr(nvidia.llvm, "to_module", translate_only)
        patch.setattr(compiler, "compile", compile_once)
        patch.setattr(CodeGenerator, "call_JitFunction", portable_call)
        patch.setattr(CodeGenerator, "get_Attribute", portable_read)
        patch.setattr(CodeGenerator, "visit_Name", portable_name)
        patch.setattr(tl.static_range, "__init__", portable_count)
        patch.setattr(JITFunction, "run", compile_only)

    def names(self) -> set[str]:
        """Returns the kernels that were compiled, each of which fits one program's shared memory."""
        for name, sizes in self.shared_bytes.items():
            assert max(sizes) <= SHARED_BYTES, f"{name} takes {max(sizes)} bytes of {SHARED_BYTES}"
        return set(self.shared_bytes)


def _leave_out(patch: pytest.MonkeyPatch) -> None:
    for passes, adders in HARMLESS.items():
        for adder in adders:
            patch.setattr(passes, adder, lambda *_: None, raising=False)  # Triton 3.6 lacks some


def launched_kernels() -> set[str]:
    """Returns the kernels that a module of ``hiserve.kernels`` launches, by module and name."""
    found = set()
    for each in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{each.name}")
        calls = (node.func for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call))
        names = {
            call.value.id for call in calls if isinstance(call, ast.Subscript) and isinstance(call.value, ast.Name)
        }
        found |= {f"{each.name}.{name}" for name in names if isinstance(getattr(module, name, None), JITFunction)}
    return found


def _refuse_numbers(arg: Any, function: Any) -> None:
    for element in arg if isinstance(arg, tl.tuple) else ():
        assert not isinstance(element, _Field | int | float), f"a tuple of plain numbers for {function}"
        _refuse_numbers(element, function)

"""Launching kernels: what Triton looks up for every launch, looked up once for each kind of call.

Triton binds arguments to names, specializes a kernel by them, and compares globals with what they
were. Most kernels here take less time than that. So a kernel that was compiled for arguments like
these is launched as it is: of the same types, as well aligned, with the same constants.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from dtensor_sample.ops.kernels.values import SIZES

_ALIGNMENT = 16
"""Kernels are specialized for addresses and integers that divide by it, and for 1."""
_INT32 = 1 << 31


class Kernel:
    """A Triton kernel, launched as one: `kernel[grid](*args, **constants_and_options)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.__doc__ = function.__doc__
        self._jit: Any = triton.jit(do_not_specialize=SIZES)(function)
        self._names = list(inspect.signature(function).parameters)
        self._compiled: dict[tuple[object, ...], CompiledKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """What launches so many programs."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        device = torch.cuda.current_device() if args[0].is_cuda else None
        kind = (device, *_kinds(args), *constants.items())
        compiled = self._compiled.get(kind)
        if compiled is None:
            compiled = self._jit[grid](*args, **constants)
            if isinstance(compiled, CompiledKernel):  # not so in Triton's interpreter
                self._compiled[kind] = compiled
            return
        rest = (constants[name] for name in self._names[len(args) :])
        compiled[(*grid, 1, 1)[:3]](*args, *rest)


def _kinds(args: tuple[Any, ...]) -> list[object]:
    """What of arguments a kernel is compiled for."""
    kinds: list[object] = []
    for argument in args:
        if argument is None:
            kinds.append(None)
        elif isinstance(argument, Tensor):
            kinds += (argument.dtype, argument.data_ptr() % _ALIGNMENT == 0)
        elif isinstance(argument, int):
            aligned = argument % _ALIGNMENT == 0
            kinds.append(1 if argument == 1 else (aligned, -_INT32 <= argument < _INT32))
        elif isinstance(argument, tuple):
            kinds.append(tuple(_kinds(argument)))
        else:
            kinds.append(type(argument))
    return kinds


def kernel(function: Callable[..., None]) -> Kernel:
    """The decorator of a kernel whose first argument is a tensor."""
    return Kernel(function)

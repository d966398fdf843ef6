"""Defining custom ops, and running them at once where nothing looks on."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dtensor_sample.ops.kernels import kernel_of
from dtensor_sample.private import looked_on

R = TypeVar("R")


class Op(Generic[R]):
    """A custom op of a function of tensors: opaque to tracing, and able to run on DTensors.

    A call on plain tensors runs the function, or on CUDA devices its kernel, without the
    dispatcher, whose 40 to 60 microseconds of host time are more than most kernels take. Tracing,
    fake tensors, DTensors and whatever else looks on go through it. No op has a gradient.
    """

    def __init__(self, name: str, mutates: Iterable[str], function: Callable[..., R]) -> None:
        functools.update_wrapper(self, function)
        self.name, self._function = name, function
        self._op = torch.library.custom_op(
            f"dtensor_sample::{name}", function, mutates_args=tuple(mutates)
        )
        self._op.register_kernel("cuda")(lambda *args: self._kernel(*args))
        self.register_fake = self._op.register_fake

    @functools.cached_property
    def _kernel(self) -> Callable[..., R]:
        """What runs on CUDA devices."""
        return kernel_of(self.name) or self._function

    def __call__(self, *args: Any) -> R:
        """What the function returns."""
        first = args[0]
        if not torch.compiler.is_compiling() and type(first) is Tensor and not looked_on():
            if first.is_cpu:
                return self._function(*args)
            if first.is_cuda:
                return self._kernel(*args)
        result: R = self._op(*args)
        return result


def define(name: str, *, mutates: Iterable[str] = ()) -> Callable[[Callable[..., R]], Op[R]]:
    """Make a function of tensors, the first argument one of them, an op.

    Args:
        name: in the namespace "dtensor_sample", and of its kernel if it has one.
        mutates: names of the arguments that it writes to.
    """

    def made(function: Callable[..., R]) -> Op[R]:
        return Op(name, mutates, function)

    return made

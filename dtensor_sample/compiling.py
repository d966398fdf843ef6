"""torch.compile for samplers."""

from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """A compiled copy of a function, without graph breaks and for any number of rows.

    The compiler limits the variants of a code object: were samplers of one process to share one,
    those of different exchanges and dtypes would use up its limit together.
    """
    plain = cast("FunctionType", function)
    copy = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)
    copy.__kwdefaults__, copy.__defaults__ = plain.__kwdefaults__, plain.__defaults__
    result: Callable[P, R] = torch.compile(copy, fullgraph=True, dynamic=True)
    return result

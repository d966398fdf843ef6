"""Checks of what users pass: one message a property, naming argument, expectation and value.

All of them read host data only, so that equal arguments are refused on every rank alike, before any
collective.
"""

import math
import operator
import sys
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")
INT64_MAX = (1 << 63) - 1


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int in [low, high]; ValueError for anything else, bools and floats included."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be {_integer(low, high)}, got {value!r}") from None
    if not _within(number, number, low, high):
        raise ValueError(f"{name} must be {_integer(low, high)}, got {number}")
    return number


def symbol(name: str, value: object, low: int, high: int) -> int:
    """The same, but to a compiler an int64 stays a symbol, and is no constant of its graph."""
    if type(value) is int and _within(value, value, low, min(high, INT64_MAX)):
        return value
    return integer(name, value, low, high)


def _within(least: int, most: int, low: int | None, high: int | None) -> bool:
    return (low is None or least >= low) and (high is None or most <= high)


def _integer(low: int | None, high: int | None) -> str:
    """What an integer in [low, high] is called."""
    if low is None:
        return "an integer"
    if high is None:
        return f"an integer >= {low}"
    bits = high.bit_length()
    told = f"2**{bits})" if bits > 30 and high + 1 == 1 << bits else f"{high}]"
    return f"an integer in [{low}, {told}"


def real(name: str, value: object, low: float = 0.0, high: float = math.inf) -> float:
    """`value` as a finite float in [low, high]; a number stays a symbol to a compiler."""
    most, plain = min(high, sys.float_info.max), type(value) in (int, float)
    if isinstance(value, int | float) and plain and low <= value <= most:
        return 1.0 * value
    expected = f"a number in [{low:g}, {high:g}]"
    if high == math.inf:
        expected = f"a finite number >= {low:g}"
    try:
        if isinstance(value, bool | np.bool_ | np.complexfloating | str | bytes):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(f"{name} must be {expected}, got {value!r}") from None
    if not (math.isfinite(number) and low <= number <= high):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return number


def seed_bits(name: str, value: object) -> int:
    """`value` as a seed: an int of 64 bits without sign."""
    return integer(name, value, 0, (1 << 64) - 1)


def vocabulary(value: object) -> int:
    """`value` as a vocabulary size: below 2**31."""
    return integer("vocab_size", value, 1, (1 << 31) - 1)


def integers(
    name: str,
    values: object,
    length: int | None = None,
    low: int | None = None,
    high: int | None = None,
) -> list[int]:
    """A flat sequence of ints on the host in [low, high]; arrays and CPU tensors too."""
    if isinstance(values, DTensor):
        raise ValueError(f"{name} must be plain host data, got a DTensor")
    if isinstance(values, Tensor) and not values.is_cpu:
        raise ValueError(f"{name} must be host data, got a tensor on {values.device}")
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a sequence of integers, got {values!r}")
    if length is not None and len(values) != length:
        raise ValueError(f"{name} must have {length} entries, got {len(values)}")
    if not values or (
        set(map(type, values)) == {int} and _within(min(values), max(values), low, high)
    ):
        return list(values)  # nothing to tell apart, and many times as fast
    return [integer(f"{name}[{i}]", value, low, high) for i, value in enumerate(values)]


def bools(name: str, values: object, length: int) -> list[bool]:
    """A flat sequence of bools, or an array of them."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a sequence of bools, got {type(values).__name__}")
    if len(values) != length:
        raise ValueError(f"{name} must have {length} entries, got {len(values)}")
    for i, value in enumerate(values):
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name}[{i}] must be a bool, got {value!r}")
    return list(map(bool, values))


def on_device(
    name: str,
    value: object,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """ValueError unless `value` is a plain tensor of a shape, one of some dtypes, on a device."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        raise ValueError(f"{name} must be a plain tensor, got {type(value).__name__}")
    if (tuple(value.shape), value.device) != (tuple(shape), device) or value.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be {kinds} of shape {list(shape)} on {device}, got {value.dtype} of "
            f"shape {list(value.shape)} on {value.device}"
        )


def one_of(name: str, value: object, choices: Sequence[str]) -> str:
    """`value` if it is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}")
    return value


def instance(name: str, value: object, kind: type[T]) -> T:
    """`value` if it is of a kind."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    return value

"""Named ranges for torch.profiler: where the time of a step goes.

The names are `dtensor_sample.plan`, `.exchange`, `.threshold` (largest values, thresholds and
weights), `.draw`, `.verify` and `.gather`: ranges of the host, so a replayed CUDA graph has none.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import record_function

from dtensor_sample.private import profiler_enabled

P = ParamSpec("P")
T = TypeVar("T")


def profiled(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function with the range `dtensor_sample.<name>`; traced code has none inside."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def ranged(*args: P.args, **kwargs: P.kwargs) -> T:
            # A range costs 10 to 20 microseconds, also while nobody looks.
            if torch.compiler.is_compiling() or not profiler_enabled():
                return function(*args, **kwargs)
            with record_function(f"dtensor_sample.{name}"):
                return function(*args, **kwargs)

        return ranged

    return decorate

"""Parts of a step under torch.compile: variants that serve all sizes, the same on every rank."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from dtensor_sample.private import many_variants
from dtensor_sample.profile import profiled

P = ParamSpec("P")
T = TypeVar("T")


def compiled(name: str, function: Callable[P, T]) -> Callable[P, T]:
    """`function` under torch.compile, in the range `name`, with each size a symbol of its own.

    The compiler would take sizes to be one that are equal when it first meets them, such as the
    columns of a shard and the drafts of a step. Shards differ by a column: a rank on which they are
    equal by chance would compile again, alone, when they no longer are, and the others would wait
    for it within a collective, maybe for longer than that may take. And it would give up after some
    variants: there is one for each combination of filters, biases, counts and masks.
    """
    run = torch.compile(function, fullgraph=True, dynamic=True)

    @wraps(function)
    def run_any_size(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():  # by the options of who compiles it
            return run(*args, **kwargs)
        with many_variants():
            return run(*args, **kwargs)

    return profiled(name)(run_any_size)

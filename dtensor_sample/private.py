"""What this library uses of torch that is not public, and what it does with a torch without it.

Nothing here changes a result: only host time, ranges of a profiler, and how often is compiled.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

profiler_enabled: Callable[[], bool] = getattr(
    torch._C._autograd, "_profiler_enabled", lambda: True
)
"""Whether a profiler looks on; otherwise always, which costs host time."""


def looked_on() -> bool:
    """Whether a mode or a transform of torch wants to see every op; otherwise always."""
    try:
        return (
            torch._C._len_torch_dispatch_stack() > 0
            or torch._C._len_torch_function_stack() > 0
            or torch._C._functorch.maybe_current_level() is not None
        )
    except AttributeError:
        return True


def many_variants() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Two contexts to call a compiled function in, again and again.

    They let the compiler take equal sizes for different symbols, and make up to 256 variants.
    Otherwise it compiles once more, and gives up after 8.
    """
    try:
        from torch.fx.experimental import _config

        shapes = _config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        limits = {"recompile_limit": 256, "accumulated_recompile_limit": 1024}
        return shapes, torch._dynamo.config.patch(limits)
    except (ImportError, AttributeError):
        return nullcontext(), nullcontext()


def constant(function: F) -> F:
    """What `torch.compiler.assume_constant_result` does, without importing the compiler for it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function

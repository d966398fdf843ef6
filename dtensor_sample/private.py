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


def sizes_of_their_own() -> AbstractContextManager[object]:
    """Lets the compiler take equal sizes for different symbols; otherwise it compiles once more."""
    try:
        from torch.fx.experimental import _config
    except ImportError:
        return nullcontext()
    patched: AbstractContextManager[object] = _config.patch(  # type: ignore[attr-defined]
        use_duck_shape=False
    )
    return patched


def constant(function: F) -> F:
    """What `torch.compiler.assume_constant_result` does, without importing the compiler for it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function

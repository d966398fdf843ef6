"""What this library uses of torch that is not public and that it can do without.

Nothing here changes a result: only host time, ranges of a profiler, and how often is compiled.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

profiler_enabled: Callable[[], bool] = getattr(
    getattr(torch._C, "_autograd", None), "_profiler_enabled", lambda: True
)
"""Whether a profiler looks on; otherwise always, which costs host time."""
_VARIANTS = (
    ("torch.fx.experimental._config", "use_duck_shape", False),
    ("torch._dynamo.config", "recompile_limit", 256),
    ("torch._dynamo.config", "accumulated_recompile_limit", 1024),
)


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


@contextmanager
def many_variants() -> Iterator[None]:
    """Lets the compiler take equal sizes for different symbols, and make up to 256 variants.

    Without that it compiles once more, and gives up after 8.
    """
    before = []
    for module, name, value in _VARIANTS:
        with suppress(ImportError, AttributeError):
            config = importlib.import_module(module)
            before.append((config, name, getattr(config, name)))
            setattr(config, name, value)
    try:
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


def constant(function: F) -> F:
    """What `torch.compiler.assume_constant_result` does, without importing the compiler for it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function

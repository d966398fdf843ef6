"""Triton kernels of the ops, and the one place where they are chosen: for tensors on CUDA devices.

The Python function of each op is the readable twin of its kernel, equal to it bit for bit: the CPU
path, the oracle of the tests, and what runs on a GPU without Triton.
"""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

_MODULES = {
    "accept": "judge",
    "chances": "judge",
    "confidence": "confidence",
    "deliver": "rows",
    "draw": "pick",
    "eligible": "judge",
    "emit": "judge",
    "histogram": "histogram",
    "join_peaks": "rows",
    "lay_out": "judge",
    "lookup": "pick",
    "markov": "markov",
    "mass": "passes",
    "peak": "passes",
    "pick": "pick",
    "prefixes": "judge",
    "recover": "pick",
    "residual_mass": "residual",
    "row_params": "rows",
    "shortlist": "largest",
    "sift": "largest",
    "store": "store",
    "take": "rows",
    "tally": "tally",
    "top": "top",
    "uniform": "rows",
    "weigh": "whole",
}
"""In which module of this package the kernel of each op is, under the op's name."""


def kernel_of(name: str) -> Callable[..., Any] | None:
    """What launches the kernel of an op; None: it has none, or there is no GPU or no Triton."""
    usable = torch.version.cuda is not None and find_spec("triton") is not None
    return launcher(name) if usable and name in _MODULES else None


def launcher(name: str) -> Callable[..., Any]:
    """What launches the kernel of an op that has one."""
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    kernel: Callable[..., Any] = getattr(module, name)
    return kernel

"""Which exchange "auto" takes: the one that is predicted to take the least device time.

The choice is a pure function of replicated host data, so that all ranks make it alike, and tokens
do not depend on it. Predicted time is affine in rows and requests: the line of each exchange is
worked out once, in integers, and a choice compares three sums, in compiled code too.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from dtensor_sample.cost import Shape, cost_of, cost_of_drafting, cost_of_verifying
from dtensor_sample.exchange import EXCHANGES, Axis, exchange_of
from dtensor_sample.params import Filters, fixed
from dtensor_sample.predict import hardware
from dtensor_sample.private import constant

FEW_ROWS, MARGIN_PERCENT = 8, 10
"""With no more rows than these the plain way, `replicate`, is left only for one that is predicted
to be faster by more than this: there exchanges differ by less than a prediction errs."""
PICOSECONDS = 1_000_000
"""Of a microsecond."""
BY_DEVICE = {"cuda": "h200", "cpu": "cpu"}
"""Whose constants are taken for devices of a type, unless DTENSOR_SAMPLE_HARDWARE says others."""


class Line(NamedTuple):
    """Picoseconds of a step: fixed, for each row and for each request, padding included."""

    base: int
    row: int
    request: int


@functools.lru_cache(maxsize=1024)
def _lines(
    machine: str,
    ranks: int,
    vocab_size: int,
    top_k: bool,
    top_p: bool,
    drawn: bool,
    candidates: int,
    bounded: bool,
    dtype: torch.dtype,
    K: int,
    draft_dtype: torch.dtype | None,
    method: str | None,
    sharded: bool,
    loop: bool,
) -> tuple[Line, ...]:
    """The lines of the EXCHANGES; arguments are those of `fastest`, `ranks` is P."""
    filters = Filters(top_k, top_p, drawn, candidates, bounded)
    known = hardware(machine)
    many = 1024  # of a holder: where lines are read off

    def us(name: str, rows: int, requests: int) -> float:
        holders = ranks if name == "batch" else 1
        exchange, how = exchange_of(name, Axis("", ranks, 0)), (vocab_size, filters, dtype)
        shape = Shape(holders, rows * many, requests * many, (rows - requests) * many)
        if method is None:
            cost = cost_of(exchange, shape, *how, sharded=sharded)
        else:
            kind = {"draft_dtype": draft_dtype, "method": method}
            cost = cost_of_verifying(exchange, shape, K, *how, **kind)  # type: ignore[arg-type]
        if loop:
            of_requests = Shape(holders, requests * many, requests * many, 0)
            drafting = cost_of_drafting(exchange, of_requests, K, *how)
            cost = replace(cost, ops=(*cost.ops, *drafting.ops))
        return known.us(cost, ranks) * PICOSECONDS

    def line(name: str) -> Line:
        total = many * (ranks if name == "batch" else 1)
        first, more_rows, more_requests = us(name, 2, 1), us(name, 3, 1), us(name, 3, 2)
        row, request = (more_rows - first) / total, (more_requests - more_rows) / total
        return Line(round(first - (2 * row + request) * total), round(row), round(request))

    return tuple(map(line, EXCHANGES))


@constant
def lines(*step: object) -> tuple[int, ...]:
    """The lines of the EXCHANGES, one after another; constants to a compiler."""
    return tuple(number for line in _lines(*step) for number in line)


def fastest(
    machine: str,
    batch: Shape,
    every: Shape,
    vocab_size: int,
    filters: Filters,
    dtype: torch.dtype,
    *,
    K: int = 0,
    draft_dtype: torch.dtype | None = None,
    method: str | None = None,
    sharded: bool = True,
    loop: bool = False,
    among: Sequence[str] = EXCHANGES,
) -> str:
    """The exchange to take.

    Args:
        machine: name of its constants.
        batch: the step's shape under `batch`.
        every: its shape under the others.
        vocab_size: V.
        filters: what any request needs.
        dtype: of the logits.
        K: num_speculative_tokens.
        draft_dtype: of draft logits; None: drafts are one-hot.
        method: how drafts are verified; None: one token a row is sampled.
        sharded: whether logits are; otherwise every rank holds all of them.
        loop: whether the drafts are drawn in a loop, which counts too.
        among: which exchanges are possible.
    """
    of = lines(
        machine,
        batch.holders,
        vocab_size,
        *fixed(filters),
        dtype,
        K if method else 0,
        draft_dtype,
        method,
        sharded,
        loop,
    )
    # Rows may be symbols of a compiler: what follows are a few comparisons of integers.
    times = {}
    for i, name in enumerate(EXCHANGES):
        if name in among:
            base, row, request = of[3 * i], of[3 * i + 1], of[3 * i + 2]
            holders, rows, requests, _ = batch if name == "batch" else every
            times[name] = base + row * holders * rows + request * holders * requests
    best = among[0]
    for name in among:
        if times[name] < times[best]:
            best = name
    least = times[best] * (100 + MARGIN_PERCENT) // 100
    if every.rows <= FEW_ROWS and times.get("replicate", least + 1) <= least:
        return "replicate"
    return best


@constant
def machine_of(device_type: str) -> str:
    """The name of the constants for devices of a type.

    DTENSOR_SAMPLE_HARDWARE, a name or a file that was calibrated, must be the same on every rank.
    """
    return os.environ.get("DTENSOR_SAMPLE_HARDWARE") or BY_DEVICE.get(device_type, "h200")

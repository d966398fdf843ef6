"""What a step moves and holds, computed from shapes alone."""

from dataclasses import dataclass

import torch

from dtensor_sample.exchange import Exchange
from dtensor_sample.ops import BINS, PARTS
from dtensor_sample.output import RESULT_COLUMNS, TOLD_COLUMNS, VERIFIED_COLUMNS
from dtensor_sample.params import Filters, Wants
from dtensor_sample.threshold import LEVELS

INTEGER_BYTES = 8


@dataclass(frozen=True)
class Cost:
    """Cost of one step on one rank, beyond the logits shard that it was handed."""

    wire_bytes: int
    """Bytes that this rank sends, padding included; rings for all-gather and all-reduce."""
    buffer_bytes: int
    """Bytes of logits that this rank receives into a buffer."""
    collectives: tuple[str, ...]
    """The collectives, in order."""


def cost_of(
    exchange: Exchange,
    num_rows: int,
    vocab_size: int,
    filters: Filters,
    dtype: torch.dtype,
) -> Cost:
    """The cost of sampling `num_rows` rows of logits.

    With P ranks, T rows (padding included), v = ceil(V / P) columns a shard and 8-byte integers:
    `batch` sends (P-1)/P * T * v logits and its share of 3 integers a row; `replicate` (P-1) * T *
    v logits; `vocab` no logit, but 2 + 16 integers a row to each other rank, 3 integers a row in a
    ring, and for top-k and for top-p one histogram of 256 integers a row per 8 bits of the logits'
    dtype; or, if every request that filters has a top-k of at most n = 64 or 256, n + 1 numbers of
    4 bytes a row to each other rank instead. If all requests are greedy, 2 of the 18 are enough.
    """
    if exchange.axis.size == 1 or num_rows == 0:
        return Cost(0, 0, ())
    received, steps = _place(exchange, num_rows, vocab_size, dtype)
    if exchange.name == "vocab":
        steps += _weigh(exchange.axis.size, num_rows, filters, dtype)
    return _sum(received, [*steps, _settle(exchange, num_rows * RESULT_COLUMNS)])


def with_report(cost: Cost, exchange: Exchange, tokens: int, wants: Wants, *, raw: bool) -> Cost:
    """The cost of a step that also tells `tokens` tokens, padding included, about themselves.

    Each token takes 4 integers of 4 bytes, 1 more for each given id, and 2 for each of the
    likeliest and of the kept tokens. Under `vocab` also, in a ring, 1 integer of 8 bytes for the
    token and each given id, and 3 counts, or 6 with kept tokens; to each other rank, the likeliest
    and the kept tokens; and in raw modes 18 integers as `cost_of` has them.
    """
    P = exchange.axis.size
    if P == 1 or tokens == 0 or not wants.logprobs:
        return cost
    steps: list[Step] = []
    if exchange.name == "vocab":
        if raw:
            steps += [_all_gather(P, tokens * 2), _all_gather(P, tokens * PARTS)]
        steps += [_all_reduce(P, tokens * (1 + wants.given))]
        steps += [_all_reduce(P, tokens * (6 if wants.kept else 3))]
        if wants.top + wants.kept > 0:
            steps += [_all_gather(P, tokens * (wants.top + wants.kept))]
    columns = TOLD_COLUMNS + wants.given + 2 * (wants.top + wants.kept)
    steps += [_settle(exchange, tokens * columns / 2)]
    more = _sum(0, steps)
    return Cost(
        cost.wire_bytes + more.wire_bytes, cost.buffer_bytes, cost.collectives + more.collectives
    )


def cost_of_verifying(
    exchange: Exchange,
    num_rows: int,
    num_requests: int,
    num_drafts: int,
    K: int,
    vocab_size: int,
    filters: Filters,
    dtype: torch.dtype,
    draft_dtype: torch.dtype | None,
    method: str,
) -> Cost:
    """The cost of verifying up to K drafts of each of `num_requests` requests, padding included.

    As `cost_of`, with K + 5 integers a request for results. Under `vocab` also, unless all requests
    are greedy, for each of the `num_drafts` drafts that one rank verifies: its weight in a ring, 1
    integer; 16 integers to each other rank, the residual mass, which the "standard" method needs
    once a request instead; and if any draft was drawn, what `cost_of` counts for a row of draft
    logits, and 1 integer more in the ring.
    """
    P = exchange.axis.size
    if P == 1 or num_rows == 0:
        return Cost(0, 0, ())
    received, steps = _place(exchange, num_rows, vocab_size, dtype)
    if exchange.name == "vocab":
        steps += _weigh(P, num_rows, filters, dtype)
        if filters.drawn and num_drafts > 0:
            if draft_dtype is not None:
                steps += _weigh(P, num_drafts, filters, draft_dtype)
            steps += [_all_reduce(P, num_drafts * (1 if draft_dtype is None else 2))]
            residuals = num_drafts if method == "block" else num_requests
            steps += [_all_gather(P, PARTS * residuals)]
    results = num_requests * (K + 1 + VERIFIED_COLUMNS)
    return _sum(received, [*steps, _settle(exchange, results)])


Step = tuple[str, float]
"""A collective, and the bytes that it makes this rank send."""


def _place(
    exchange: Exchange, num_rows: int, vocab_size: int, dtype: torch.dtype
) -> tuple[int, list[Step]]:
    """Bytes received into a buffer, and the collective, that bring logits to where they go."""
    P = exchange.axis.size
    shard = num_rows * -(-vocab_size // P) * dtype.itemsize
    if exchange.name == "batch":
        return shard, [("all_to_all", shard * (P - 1) / P)]
    if exchange.name == "replicate":
        return P * shard, [("all_gather", (P - 1) * shard)]
    return 0, []


def _weigh(P: int, rows: int, filters: Filters, dtype: torch.dtype) -> list[Step]:
    """Peaks, thresholds and masses of rows whose vocabulary is sharded."""
    if not filters.drawn:
        return [_all_gather(P, rows * 2)]
    if filters.candidates:
        thresholds = [_all_gather(P, rows * (filters.candidates + 1) / 2)]
    else:
        levels = LEVELS[dtype] * (filters.top_k + filters.top_p)
        thresholds = [_all_reduce(P, rows * BINS)] * levels
    return [_all_gather(P, rows * 2), *thresholds, _all_gather(P, rows * PARTS)]


def _settle(exchange: Exchange, integers: float) -> Step:
    """Results of all requests to every rank."""
    P = exchange.axis.size
    if exchange.name == "vocab":
        return _all_reduce(P, integers)
    return _all_gather(P, integers / P if exchange.name == "batch" else integers)


def _all_gather(P: int, integers: float) -> Step:
    return "all_gather", (P - 1) * integers * INTEGER_BYTES


def _all_reduce(P: int, integers: float) -> Step:
    return "all_reduce", 2 * (P - 1) / P * integers * INTEGER_BYTES


def _sum(received: int, steps: list[Step]) -> Cost:
    return Cost(
        wire_bytes=round(sum(sent for _, sent in steps)),
        buffer_bytes=received,
        collectives=tuple(name for name, _ in steps),
    )

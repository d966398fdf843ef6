"""What a step moves, reads and holds, computed from shapes alone.

A step is a list of operations, each with an amount: collectives with the bytes that a rank sends,
kernels with the logits that it reads. `predict` turns such a list into microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from dtensor_sample.exchange import Exchange
from dtensor_sample.ops import BINS, OUTCOME_COLUMNS, PARTS, shortlist_integers
from dtensor_sample.output import TOLD_COLUMNS
from dtensor_sample.params import Filters, Wants
from dtensor_sample.threshold import LEVELS

INTEGER_BYTES = 8
COLLECTIVES = ("all_to_all", "all_gather", "all_reduce")
KERNELS = ("weigh", "filter", "nucleus", "histogram", "largest", "judge")
HISTOGRAM_COPIES = 5
"""Of a row's histogram, at a time."""
ROW_BYTES, SEARCHED_ROW_BYTES, LISTED_ROW_BYTES = 224, 3100, 1320
"""All else that weighing a row takes, what searching a whole one for a threshold adds, and what
listing a row's largest values takes beside the list: as measured on GPUs."""
SCANS, SEARCH_BYTES, SCAN_BYTES = 512, 5100, 4096
"""Programs that take row after row at a time, and the scratch of each that searches, or lists."""


class Op(NamedTuple):
    """One operation of a step."""

    kind: str
    """Of COLLECTIVES or KERNELS."""
    amount: float
    """Bytes that this rank sends, or logits that it reads."""


@dataclass(frozen=True)
class Cost:
    """Cost of one step on one rank, beyond the logits shard that it was handed."""

    ops: tuple[Op, ...]
    """What is done, in order."""
    buffer_bytes: int
    """Bytes of logits that this rank receives into a buffer."""
    scratch_bytes: int
    """Bytes of everything else that the step allocates; of the kernels on GPUs, about."""

    @property
    def collectives(self) -> tuple[str, ...]:
        """The collectives, in order."""
        return tuple(op.kind for op in self.ops if op.kind in COLLECTIVES)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends, padding included; rings for all-gather and all-reduce."""
        return round(sum(op.amount for op in self.ops if op.kind in COLLECTIVES))

    @property
    def peak_bytes(self) -> int:
        """Bytes that this rank allocates for the step, at most."""
        return self.buffer_bytes + self.scratch_bytes


class Shape(NamedTuple):
    """How many rows of logits each of their holders has, padding included."""

    holders: int
    """P under `batch`, where each owner holds its own; otherwise 1, which stands for every rank."""
    rows: int
    """C, rows of a holder."""
    requests: int
    """Requests of a holder."""
    drafts: int
    """Its rows but the last of each request."""

    @property
    def num_rows(self) -> int:
        """Rows of logits in all."""
        return self.holders * self.rows


def shape_of(
    batch: bool,
    ranks: int,
    rows_B: Sequence[int] | np.ndarray,
    owners_B: Sequence[int] | np.ndarray,
    budget: int | None = None,
) -> Shape:
    """The shape of a step.

    Args:
        batch: whether owners hold their own requests only.
        ranks: P.
        rows_B: [B], rows of each request, >= 1.
        owners_B: [B], the rank that owns it.
        budget: how many drafts are verified at most, of whichever requests; None: all.
    """
    if not batch:
        requests = len(rows_B)
        drafts = within(budget, int(np.sum(rows_B)) - requests)
        return Shape(1, requests + drafts, requests, drafts)
    owner_B = np.asarray(owners_B, dtype=np.int64)
    requests_P = np.bincount(owner_B, minlength=ranks)
    drafts_P = np.bincount(owner_B, rows_B, ranks).astype(np.int64) - requests_P
    drafts_P = drafts_P if budget is None else drafts_P.clip(max=budget)
    most = (int(x_P.max()) for x_P in (requests_P + drafts_P, requests_P, drafts_P))
    return Shape(ranks, *most)


def within(budget: int | None, drafts: int) -> int:
    """How many of some drafts are verified at most."""
    return drafts if budget is None else min(budget, drafts)


def cost_of(
    exchange: Exchange,
    shape: Shape,
    vocab_size: int,
    filters: Filters,
    dtype: torch.dtype,
    *,
    sharded: bool = True,
    value_dtype: torch.dtype | None = None,
) -> Cost:
    """The cost of sampling a token for each row of logits.

    With P ranks, T rows (padding included), v = ceil(V / P) columns a shard and 8-byte integers:
    `batch` sends (P-1)/P * T * v logits and its share of 5 integers a row; `replicate` (P-1) * T *
    v logits; `vocab` no logit, but 2 + 16 integers a row to each other rank, 5 integers a row in a
    ring, and for top-k and for top-p one histogram of 256 integers a row per 8 bits of the logits'
    dtype (of float32 where biases or penalties change logits: `value_dtype`); or, if every request
    that filters has a top-k of at most n = 64 or 256, 5 n / 8 + 8 integers a row to each other rank
    instead. Of the 18, the last 16 are not sent if every request that draws has such a top-k, or if
    all requests are greedy. Logits that are replicated already (`sharded` false) are not sent.

    `batch` takes 2 collectives, `replicate` too, and `vocab` 3, or 2 without the 16, and one more
    for each histogram; on an axis of size 1 none does.
    """
    if shape.num_rows == 0:
        return Cost((), 0, 0)
    received, ops = _place(exchange, shape, vocab_size, dtype, sharded)
    ops += _weigh(exchange, shape.rows, vocab_size, filters, value_dtype or dtype)
    ops += _settle(exchange, shape.num_rows * (1 + OUTCOME_COLUMNS))
    return Cost(tuple(ops), received, _scratch(exchange, shape.rows, filters))


def with_report(cost: Cost, exchange: Exchange, tokens: int, wants: Wants, *, raw: bool) -> Cost:
    """The cost of a step that also tells `tokens` tokens, padding included, about themselves.

    Each token takes 4 integers of 4 bytes, 1 more for each given id, and 2 for each of the
    likeliest and of the kept tokens. Under `vocab` also, in a ring, 1 integer of 8 bytes for the
    token and each given id, and 3 counts, or 6 with kept tokens; to each other rank, the likeliest
    and the kept tokens; and in raw modes 18 integers as `cost_of` has them.
    """
    P = exchange.axis.size
    if tokens == 0 or not wants.logprobs:
        return cost
    ops = list(cost.ops)
    if exchange.name == "vocab":
        if raw:
            ops += [*_all_gather(P, tokens * 2), *_all_gather(P, tokens * PARTS)]
        ops += _all_reduce(P, tokens * (1 + wants.given))
        ops += _all_reduce(P, tokens * (6 if wants.kept else 3))
        if wants.top + wants.kept > 0:
            ops += _all_gather(P, tokens * (wants.top + wants.kept))
    columns = TOLD_COLUMNS + wants.given + 2 * (wants.top + wants.kept)
    return replace(cost, ops=(*ops, *_settle(exchange, tokens * columns / 2)))


def cost_of_verifying(
    exchange: Exchange,
    shape: Shape,
    K: int,
    vocab_size: int,
    filters: Filters,
    dtype: torch.dtype,
    *,
    value_dtype: torch.dtype | None = None,
    draft_dtype: torch.dtype | None,
    method: str,
) -> Cost:
    """The cost of verifying up to K drafts of each request.

    As `cost_of`, with K + 5 integers a request for results. Under `vocab` also, unless all requests
    are greedy, for each of the drafts that one rank verifies: its weight in a ring, 1 integer; 16
    integers to each other rank, the residual mass, which the "standard" method needs once a request
    instead; and if any draft was drawn, 1 integer more in the ring: 2 collectives more. What draft
    logits weigh is known from when the drafts were drawn.
    """
    if shape.num_rows == 0:
        return Cost((), 0, 0)
    received, ops = _place(exchange, shape, vocab_size, dtype, True)
    ops += _weigh(exchange, shape.rows, vocab_size, filters, value_dtype or dtype)
    scratch = _scratch(exchange, shape.rows, filters)
    if filters.drawn and shape.drafts > 0:
        drawn, P = draft_dtype is not None, exchange.axis.size
        residuals = shape.drafts if method == "block" else shape.requests
        columns = _columns(exchange, vocab_size)
        ops += [Op("judge", residuals * columns * (2 if drawn else 1))]
        if exchange.name == "vocab":
            ops += _all_reduce(P, shape.drafts * (2 if drawn else 1))
            ops += _all_gather(P, PARTS * residuals)
    ops += _settle(exchange, shape.holders * shape.requests * (K + 1 + OUTCOME_COLUMNS))
    return Cost(tuple(ops), received, scratch)


def cost_of_drafting(
    exchange: Exchange,
    shape: Shape,
    K: int,
    vocab_size: int,
    filters: Filters,
    dtype: torch.dtype,
) -> Cost:
    """The cost of drawing K drafts of each request in a loop over base logits of all of them.

    Where rows are whole, owners talk before and after the loop only; under `vocab`, at every step.

    Args:
        exchange: under which.
        shape: of one row a request.
        K: num_speculative_tokens.
        vocab_size: V.
        filters: what any request needs.
        dtype: of the logits.
    """
    step = cost_of(exchange, shape, vocab_size, filters, dtype, sharded=False)
    if exchange.name == "vocab":
        return replace(step, ops=(*step.ops * K, *_settle(exchange, K * shape.requests)))
    every = shape._replace(rows=K * shape.rows, requests=K * shape.requests)
    moved = cost_of(exchange, every, vocab_size, filters, dtype).ops
    kernels = tuple(op for op in step.ops if op.kind in KERNELS)
    return replace(step, ops=tuple(op for op in moved if op.kind in COLLECTIVES) + kernels * K)


def draft_cache_bytes(
    exchange: Exchange, slots: int, K: int, vocab_size: int, dtype: torch.dtype
) -> int:
    """Bytes of a rank's part of the draft-logits cache: 1/P, and under `replicate` all of it."""
    holders = exchange.axis.size if exchange.name == "batch" else 1
    return -(-slots // holders) * K * _columns(exchange, vocab_size) * dtype.itemsize


def _columns(exchange: Exchange, vocab_size: int) -> int:
    """Columns of a row that a rank reads."""
    return -(-vocab_size // exchange.axis.size) if exchange.name == "vocab" else vocab_size


def _place(
    exchange: Exchange, shape: Shape, vocab_size: int, dtype: torch.dtype, sharded: bool
) -> tuple[int, list[Op]]:
    """Bytes received into a buffer, and the collective, that bring logits to where they go."""
    P = exchange.axis.size
    shard = shape.num_rows * -(-vocab_size // P) * dtype.itemsize
    if P == 1 or not sharded or exchange.name == "vocab":
        return 0, []
    if exchange.name == "batch":
        return shard, [Op("all_to_all", shard * (P - 1) / P)]
    return P * shard, [Op("all_gather", (P - 1) * shard)]


def _weigh(
    exchange: Exchange, rows: int, vocab_size: int, filters: Filters, dtype: torch.dtype
) -> list[Op]:
    """Peaks, thresholds and masses of rows."""
    P, logits = exchange.axis.size, rows * _columns(exchange, vocab_size)
    # The largest value takes one look at each logit, and a draw another.
    weigh = Op("weigh", 2 * logits if filters.drawn else logits)
    searches = filters.top_k + filters.top_p
    if P == 1 or exchange.name != "vocab":
        if searches == 0:
            return [weigh]
        if filters.top_p_alone:
            return [weigh, Op("nucleus", logits)]
        return [Op("weigh", logits), Op("filter", logits)]  # what is left is weighed in the search
    if not filters.drawn:
        return [weigh, *_all_gather(P, rows * 2)]
    masses = _all_gather(P, rows * PARTS)
    if filters.candidates:
        listed = _all_gather(P, rows * shortlist_integers(filters.candidates))
        more = [] if filters.bounded else [Op("weigh", logits), *masses]
        return [Op("largest", logits), *listed, *more]
    histogram = [Op("histogram", logits), *_all_reduce(P, rows * BINS)]
    thresholds = histogram * LEVELS[dtype] * searches
    return [weigh, *_all_gather(P, rows * 2), *thresholds, *masses]


def _settle(exchange: Exchange, integers: float) -> list[Op]:
    """Results of all requests to every rank."""
    P = exchange.axis.size
    if exchange.name == "vocab":
        return _all_reduce(P, integers)
    return _all_gather(P, integers / P if exchange.name == "batch" else integers)


def _scratch(exchange: Exchange, rows: int, filters: Filters) -> int:
    """Bytes that weighing rows takes beside their logits, at most."""
    P, searched = exchange.axis.size, filters.top_k or filters.top_p
    most = P * PARTS * INTEGER_BYTES  # masses of all segments
    if searched and exchange.name == "vocab" and P > 1:
        if filters.candidates:  # where lists are made, or where all of them come together
            each = shortlist_integers(filters.candidates)
            joined = (P * each + max(each, P * PARTS)) * INTEGER_BYTES
            most = max(LISTED_ROW_BYTES + each * INTEGER_BYTES, joined)
            return rows * (ROW_BYTES + most) + min(rows, SCANS) * SCAN_BYTES
        most = max(most, HISTOGRAM_COPIES * BINS * INTEGER_BYTES)
    elif searched:
        most += SEARCHED_ROW_BYTES
        return rows * (ROW_BYTES + most) + min(rows, SCANS) * SEARCH_BYTES
    return rows * (ROW_BYTES + P * 2 * INTEGER_BYTES + most)  # and packed peaks


def _all_gather(P: int, integers: float) -> list[Op]:
    return [Op("all_gather", (P - 1) * integers * INTEGER_BYTES)] * (P > 1)


def _all_reduce(P: int, integers: float) -> list[Op]:
    return [Op("all_reduce", 2 * (P - 1) / P * integers * INTEGER_BYTES)] * (P > 1)

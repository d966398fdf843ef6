"""What a step moves and holds, computed from shapes alone."""

from dataclasses import dataclass

import torch

from dtensor_sample.exchange import Exchange
from dtensor_sample.ops import BINS
from dtensor_sample.output import RESULT_COLUMNS
from dtensor_sample.params import Filters
from dtensor_sample.threshold import LEVELS


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
    v logits; `vocab` no logit, but 2 + 1 integers a row to each other rank, 3 integers a row in a
    ring, and for top-k and for top-p one histogram of 256 integers a row per 8 bits of the logits'
    dtype.
    """
    P, item, integer = exchange.axis.size, dtype.itemsize, 8
    if P == 1 or num_rows == 0:
        return Cost(0, 0, ())
    shard = num_rows * -(-vocab_size // P) * item
    result = num_rows * RESULT_COLUMNS * integer
    gather, ring = P - 1, 2 * (P - 1) / P
    steps: list[tuple[str, float]]
    if exchange.name == "batch":
        steps = [("all_to_all", shard * (P - 1) / P), ("all_gather", gather * result / P)]
        received = shard
    elif exchange.name == "replicate":
        steps = [("all_gather", gather * shard), ("all_gather", gather * result)]
        received = P * shard
    else:
        histograms = LEVELS[dtype] * (filters.top_k + filters.top_p)
        steps = [
            ("all_gather", gather * num_rows * 2 * integer),
            *[("all_reduce", ring * num_rows * BINS * integer)] * histograms,
            ("all_gather", gather * num_rows * integer),
            ("all_reduce", ring * result),
        ]
        received = 0
    return Cost(
        wire_bytes=round(sum(sent for _, sent in steps)),
        buffer_bytes=received,
        collectives=tuple(name for name, _ in steps),
    )

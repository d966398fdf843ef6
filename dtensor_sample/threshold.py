"""min-p, top-k and top-p: each row keeps the tokens at or above one value.

A filter that is a threshold depends on no order of tokens, no batch and no backend, and no mask is
written. min-p's value is computed; those of top-k and top-p are found by radix selection over the
ordered 32-bit key of a float32: a histogram of the next eight bits, the digit at which the running
count (top-k) or integer mass (top-p) from above reaches its target, and so on. Histograms are
integer sums, so they add up over shards to the same threshold.

Where a row is sharded, and every request that filters keeps few tokens by top-k, ranks exchange
the largest values of their shards instead: see `ops.shortlist`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dtensor_sample import ops
from dtensor_sample.exchange import Exchange, Logits
from dtensor_sample.ops.largest import TOP_P_ONE
from dtensor_sample.params import Filters

LEVELS = {torch.float32: 4, torch.float16: 3, torch.bfloat16: 2}
"""Digits that can differ: the float32 of a 16-bit float ends in zeros."""


def threshold(
    logits: Logits,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    filters: Filters,
    exchange: Exchange,
    vocab_size: int,
) -> Tensor:
    """The value at or above which each row's tokens are kept: [R] float32.

    Args:
        logits: R rows.
        peak_R: [R] float32, each row's largest value.
        floor_R: [R] float32, the threshold so far: min-p's.
        scale_R: [R] float32, log2(e) / temperature.
        top_k_R: [R] int64, >= 1.
        top_p_R: [R] int64, fixed point of 31 bits.
        filters: which of top-k and top-p any row uses; replicated host data.
        exchange: where segments are.
        vocab_size: V.
    """

    def select(target_of: Callable[[Tensor], Tensor], *, weighted: bool) -> Tensor:
        """The largest value such that tokens at or above it amount to the target."""
        levels = LEVELS[logits.value_dtype]
        prefix_R = torch.zeros_like(top_k_R)
        target_R, above_R = prefix_R, prefix_R
        for level in range(levels):
            bins_RB = ops.histogram(
                *logits, peak_R, floor_R, scale_R, prefix_R, vocab_size, level, weighted
            )
            from_here_RB = exchange.total(bins_RB).flip(1).cumsum(1).flip(1)
            if level == 0:
                target_R = target_of(from_here_RB[:, 0])
            reached_RB = above_R[:, None] + from_here_RB >= target_R[:, None]
            digit_R = (reached_RB.sum(1) - 1).clamp(min=0)  # a row without tokens reaches nothing
            next_RB = torch.nn.functional.pad(from_here_RB[:, 1:], (0, 1))
            above_R = above_R + next_RB.gather(1, digit_R[:, None])[:, 0]
            prefix_R = prefix_R << ops.DIGIT_BITS | digit_R
        return ops.key_value(prefix_R, levels * ops.DIGIT_BITS)

    if filters.top_k:
        kth_R = select(lambda count_R: torch.minimum(count_R, top_k_R), weighted=False)
        filtered_R = (top_k_R < vocab_size) & (peak_R > -torch.inf)
        floor_R = torch.where(filtered_R, torch.maximum(floor_R, kth_R), floor_R)
    if filters.top_p:
        nucleus_R = select(lambda mass_R: ops.fraction(mass_R, top_p_R), weighted=True)
        filtered_R = (top_p_R < TOP_P_ONE) & (peak_R > -torch.inf)
        floor_R = torch.where(filtered_R, torch.maximum(floor_R, nucleus_R), floor_R)
    return floor_R

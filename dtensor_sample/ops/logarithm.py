"""Logarithms of probabilities and entropies, from a row's integer sums."""

import math

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import weight_bits

LN_2 = math.log(2)


@define("log_probability")
def log_probability(
    value_RN: Tensor, peak_R: Tensor, scale_R: Tensor, total_R: Tensor, vocab_size: int
) -> Tensor:
    """Ln p of tokens: (x - peak) / temperature - ln(total / 2**S).

    Args:
        value_RN: [R, N] float32, values of N tokens of each row; -inf: it is not kept.
        peak_R: [R] float32, the largest value of each row.
        scale_R: [R] float32, log2(e) / temperature.
        total_R: [R] int64, the row's mass, see `weights`.
        vocab_size: V, fixes S.

    Returns:
        [R, N] float32; -inf where the value is.

    Example: of two equal logits each weighs 2**S, and ln p is -ln 2.
    """
    below_RN = (value_RN.double() - peak_R.double()[:, None]) * (scale_R.double() * LN_2)[:, None]
    found_RN = (below_RN - _log_total(total_R, vocab_size)[:, None]).float()
    return torch.where(value_RN > -torch.inf, found_RN, -torch.inf)


@log_probability.register_fake
def _(
    value_RN: Tensor, peak_R: Tensor, scale_R: Tensor, total_R: Tensor, vocab_size: int
) -> Tensor:
    return torch.empty_like(value_RN, memory_format=torch.contiguous_format)


@define("entropy")
def entropy(total_R: Tensor, spread_R: Tensor, vocab_size: int) -> Tensor:
    """-sum p ln p of each row, in nats.

    With weights w = 2**(S + y) that is ln(total / 2**S) + ln 2 * sum(w * -y) / total.

    Args:
        total_R: [R] int64, the row's mass, see `weights`.
        spread_R: [R] int64, the sum of w * -y, see `tally`.
        vocab_size: V, fixes S.

    Returns:
        [R] float32; -inf where a row has no token.

    Example: two equal logits spread nothing, and their entropy is ln 2.
    """
    mean_R = spread_R.double() / total_R.clamp(min=1).double()
    return (_log_total(total_R, vocab_size) + LN_2 * mean_R).float()


@entropy.register_fake
def _(total_R: Tensor, spread_R: Tensor, vocab_size: int) -> Tensor:
    return total_R.new_empty(total_R.shape, dtype=torch.float32)


def _log_total(total_R: Tensor, vocab_size: int) -> Tensor:
    """[R] float64: ln(total / 2**S); -inf where a row has no token."""
    return (total_R.double() * 0.5 ** weight_bits(vocab_size)).log()


shard_like(torch.ops.dtensor_sample.log_probability.default, "row", "row row row row -")
shard_like(torch.ops.dtensor_sample.entropy.default, "row", "row row -")

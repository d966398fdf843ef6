"""How likely a draft position is to be accepted: the logistic function of an exact sum.

Products are rounded to multiples of 2**-28 and added as integers, so that their order does not
matter. The logistic function takes nothing but float64 operations that round in one way.
"""

import math

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import COEFFICIENTS

UNIT_BITS = 28
"""Sums are in units of 2**-28."""
MOST = 1 << 47
"""Units that a product counts at most, 2**19: 2**15 of them cannot overflow."""
LOG2_E = float(torch.tensor(math.log2(math.e), dtype=torch.float32))
POWER = tuple(torch.tensor(COEFFICIENTS, dtype=torch.float32).tolist())
"""Of 2**f on [-1/2, 1/2], as in `ops.values`."""
FARTHEST = 64.0
"""A binary exponent beyond it changes nothing in float32."""


def units(product: Tensor) -> Tensor:
    """Float64 numbers as int64 in units of 2**-28, to the nearest; NaN counts as 0."""
    scaled = product.nan_to_num(0.0) * float(1 << UNIT_BITS)
    return scaled.clamp(-MOST, MOST).round().to(torch.int64)


@define("confidence")
def confidence(hidden_RH: Tensor, weight_H: Tensor, offset_R: Tensor) -> Tensor:
    """1 / (1 + exp(-(weight . hidden + offset))) of each row.

    Args:
        hidden_RH: [R, H] float32, bfloat16 or float16, H < 2**15. NaN counts as 0.
        weight_H: [H] float32.
        offset_R: [R] int64, in units of 2**-28, see `units`.

    Returns:
        [R] float32 in [0, 1].
    """
    product_RH = hidden_RH.to(torch.float64) * weight_H.to(torch.float64)
    total_R = units(product_RH).sum(1) + offset_R
    exponent_R = total_R.to(torch.float64) * 2.0**-UNIT_BITS * -LOG2_E
    exponent_R = exponent_R.clamp(-FARTHEST, FARTHEST)
    whole_R = exponent_R.round()
    fraction_R = exponent_R - whole_R
    power_R = torch.full_like(fraction_R, POWER[-1])
    for coefficient in POWER[-2::-1]:
        power_R = power_R * fraction_R + coefficient
    power_R *= ((whole_R.to(torch.int64) + 1023) << 52).view(torch.float64)
    return (1.0 / (1.0 + power_R)).to(torch.float32)


@confidence.register_fake
def _(hidden_RH: Tensor, weight_H: Tensor, offset_R: Tensor) -> Tensor:
    return hidden_RH.new_empty(hidden_RH.shape[0], dtype=torch.float32)


shard_like(torch.ops.dtensor_sample.confidence.default, "row", "row same row")

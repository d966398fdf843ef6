"""Base logits of a draft position plus what the token before it adds: a low-rank table of biases.

The bias of id v after id u is a product of two rows of factors, one for u and one for v. Factors
are integers of eight bits with a scale for each row, so that their product is exact in any order:
on CPUs and GPUs, for any number of rows, and for any shard of the vocabulary. Only the few
operations after it round, each once and element by element.
"""

import torch
from torch import Tensor

from dtensor_sample.ops.define import define

MOST_FACTORS = 1024
"""So many products of two factors add up to less than 2**24: float32 holds every sum of them."""
LARGEST_FACTOR = 127


def quantized(x_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of numbers as factors in [-127, 127] times a scale each.

    Args:
        x_NF: [N, F] floating point.

    Returns:
        [N, F] int8, the nearest factors; and [N] float32, the largest number of each row / 127.

    Example: [1, -0.25, 0.5] becomes [127, -32, 64] with a scale of 1 / 127.
    """
    x_NF = x_NF.detach().to(torch.float32)
    scale_N = x_NF.abs().amax(1) / LARGEST_FACTOR
    factor_NF = (x_NF / scale_N[:, None]).nan_to_num(0.0).round()
    return factor_NF.clamp(-LARGEST_FACTOR, LARGEST_FACTOR).to(torch.int8), scale_N


@define("markov")
def markov(
    x_QSv: Tensor,
    floor_Q: Tensor | None,
    before_Q: Tensor,
    left_VF: Tensor,
    left_scale_V: Tensor,
    right_DF: Tensor,
    right_scale_D: Tensor,
    target_D: Tensor | None,
    width: int,
) -> Tensor:
    """The logits of one draft position, given the tokens before it.

    `x + (left[before] . right) * left_scale[before] * right_scale`, every operation rounded to
    float32, and at last to the dtype of x.

    It has no sharding rule: it is run on what a rank holds, before that becomes a row of a cache.

    Args:
        x_QSv: [Q, S, v] base logits, any strides; S * v >= D.
        floor_Q: [Q] float32, base logits below it become -inf; None: none do.
        before_Q: [Q] int64 in [-1, V): the tokens before. After -1 no token is left.
        left_VF: [V, F] int8 or float32 factors of the token before, see `quantized`.
        left_scale_V: [V] float32.
        right_DF: [D, F] int8 or float32 factors of the first D columns.
        right_scale_D: [D] float32.
        target_D: [D] int64, distinct columns of the result; None: their own.
        width: W, columns of the result.

    Returns:
        [Q, W] logits of the dtype of x; -inf in columns that no column of x goes to.

    Example: factors [2, 1] and [3, 5] with scales 0.5 and 1 add 5.5 to a logit.
    """
    D, row_Q = right_DF.shape[0], before_Q.clamp(min=0)
    # Of integers below 2**24, so exact.
    product_QD = left_VF[row_Q].to(torch.float32) @ right_DF.to(torch.float32).T
    base_QD = x_QSv.flatten(1)[:, :D].to(torch.float32)
    value_QD = base_QD + product_QD * left_scale_V[row_Q][:, None] * right_scale_D
    value_QD.masked_fill_((before_Q < 0)[:, None], -torch.inf)
    if floor_Q is not None:
        value_QD.masked_fill_(base_QD < floor_Q[:, None], -torch.inf)
    value_QW = x_QSv.new_full((x_QSv.shape[0], width), -torch.inf)
    if target_D is None:
        value_QW[:, :D] = value_QD
    else:
        value_QW[:, target_D] = value_QD.to(x_QSv.dtype)
    return value_QW


@markov.register_fake
def _(
    x_QSv: Tensor,
    floor_Q: Tensor | None,
    before_Q: Tensor,
    left_VF: Tensor,
    left_scale_V: Tensor,
    right_DF: Tensor,
    right_scale_D: Tensor,
    target_D: Tensor | None,
    width: int,
) -> Tensor:
    return x_QSv.new_empty((x_QSv.shape[0], width))

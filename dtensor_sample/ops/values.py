"""What a logit is worth: its value, whether it is kept, and its integer weight. Plain torch.

Every float operation that precedes a decision is in this file, and runs only inside the custom ops
of this package, so tracing never computes it in another way. Weights are integers: they add up to
the same sum in any order, over any blocks and shards, which is what makes every layout agree.

The exponential is an integer too. `2**y` for `y <= 0` is split as `2**n * 2**f` with 25 fraction
bits; a polynomial of degree 6 with 31-bit coefficients gives `2**f` to 3.1e-9, and it takes one
float32 subtraction and one float32 multiplication to get there. Plain float32 `exp` was rejected:
vector body and tail, eager and compiled code, CPU and GPU differ in its last bits.
"""

import torch
from torch import Tensor

FRACTION_BITS = 25
COEFFICIENTS = (2147483648, 1488521918, 515888952, 119151309, 20783485, 2671658, 466326)
"""2**f on [0, 1), constant term first, times 2**31."""
LOWEST_EXPONENT = -62.0
"""Below it a weight rounds to 0 for every vocabulary size."""


def weight_bits(vocab_size: int) -> int:
    """S: the largest token of a row weighs 2**S, and a whole row at most 2**62."""
    return 62 - (vocab_size - 1).bit_length()


def token_ids(x_NSv: Tensor, first_id_S: Tensor) -> Tensor:
    """[S, v] int64: the vocabulary id of each column of each segment."""
    return first_id_S[:, None] + torch.arange(x_NSv.shape[2], device=x_NSv.device)


def values(x_NSv: Tensor, first_id_S: Tensor, rows_R: Tensor | None, vocab_size: int) -> Tensor:
    """[R, S, v] float32 values of some rows of logits.

    NaN and ids beyond the vocabulary are -inf, +inf is the largest finite value, -0 is +0.

    Args:
        x_NSv: [N, S, v] logits, any strides, float32, bfloat16 or float16.
        first_id_S: [S] int64, the vocabulary id of each segment's first column.
        rows_R: [R] int64, which rows; -1 stands for a row of -inf. None: all N.
        vocab_size: ids from here on do not exist.
    """
    top = torch.finfo(x_NSv.dtype).max
    x_RSv = _rows(x_NSv, rows_R).float() + 0.0
    outside_RSv = (token_ids(x_NSv, first_id_S) >= vocab_size)[None] | x_RSv.isnan()
    if rows_R is not None:
        outside_RSv |= (rows_R < 0)[:, None, None]
    return torch.where(outside_RSv, -torch.inf, x_RSv).clamp(max=top)


def count_nans(x_NSv: Tensor, first_id_S: Tensor, rows_R: Tensor | None, vocab_size: int) -> Tensor:
    """[R, S] int64: NaN among the logits of the vocabulary; arguments as in `values`."""
    nan_RSv = _rows(x_NSv, rows_R).isnan() & (token_ids(x_NSv, first_id_S) < vocab_size)
    nans_RS = nan_RSv.sum(2)
    return nans_RS if rows_R is None else nans_RS * (rows_R >= 0)[:, None]


def _rows(x_NSv: Tensor, rows_R: Tensor | None) -> Tensor:
    return x_NSv if rows_R is None else x_NSv[rows_R.clamp(min=0)]


def count_rows(x_NSv: Tensor, rows_R: Tensor | None) -> int:
    """R, for the fakes of ops."""
    return x_NSv.shape[0] if rows_R is None else rows_R.shape[0]


def weights(
    value_RSv: Tensor, peak_R: Tensor, floor_R: Tensor, scale_R: Tensor, vocab_size: int
) -> Tensor:
    """[R, S, v] int64: 2**S * 2**((value - peak) * scale) to the nearest integer; 0 where not kept.

    Args:
        value_RSv: float32 from `values`.
        peak_R: float32, the largest value of each row.
        floor_R: float32, the threshold: kept are values >= it, and never -inf.
        scale_R: float32, log2(e) / temperature.
        vocab_size: V, fixes S.
    """
    exponent_RSv = (value_RSv - peak_R[:, None, None]) * scale_R[:, None, None]
    kept_RSv = (
        (value_RSv >= floor_R[:, None, None])
        & (value_RSv > -torch.inf)
        & (exponent_RSv >= LOWEST_EXPONENT)
    )
    fixed_RSv = torch.where(kept_RSv, exponent_RSv, 0.0).mul(1 << FRACTION_BITS).to(torch.int64)
    fraction_RSv = (fixed_RSv & (1 << FRACTION_BITS) - 1) << 31 - FRACTION_BITS
    power_RSv = torch.full_like(fixed_RSv, COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        power_RSv = power_RSv.mul_(fraction_RSv).bitwise_right_shift_(31).add_(coefficient)
    shift_RSv = -(fixed_RSv >> FRACTION_BITS)
    half_RSv = (torch.ones_like(shift_RSv) << shift_RSv) >> 1
    weight_RSv = ((power_RSv << weight_bits(vocab_size) - 31) + half_RSv) >> shift_RSv
    return torch.where(kept_RSv, weight_RSv, 0)


def ordered_keys(value: Tensor) -> Tensor:
    """Float32 values as int64 in [0, 2**32) of the same order; values must not be NaN or -0."""
    bits = value.view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits + (1 << 31), -1 - bits)


def from_ordered_keys(key: Tensor) -> Tensor:
    """The float32 values of ordered keys."""
    bits = torch.where(key >= 1 << 31, key - (1 << 31), -1 - key)
    return bits.to(torch.int32).view(torch.float32)


def key_value(prefix: Tensor, bits: int) -> Tensor:
    """The float32 value whose ordered key begins with `bits` given bits.

    The bits left out of a 16-bit float are zeros in the float: zeros in the key of a positive
    value, ones in that of a negative one.
    """
    rest = 32 - bits
    fill = torch.where(prefix >> bits - 1 == 1, 0, (1 << rest) - 1)
    return from_ordered_keys(prefix << rest | fill)

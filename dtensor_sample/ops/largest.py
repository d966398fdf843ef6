"""The peak and the largest values of each row's segments, and the thresholds that follow from them.

The k largest logits of a row are among the k largest of each of its segments. So where a row is
sharded and top-k keeps few tokens, ranks need to exchange no more than those: from them follows
top-k's threshold, and top-p's on what top-k left. Tokens tied with the last one listed are counted,
so both are exact for every row. The peak comes from the same reading, and goes the same way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_sample.ops.define import define
from dtensor_sample.ops.peak import packed_peaks
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_nans, count_rows, values, weights

TOP_P_ONE = 1 << 31
"""top_p as a fixed-point number of 31 fractional bits: this is 1, the filter off."""


def listed_integers(size: int) -> int:
    """Integers of 8 bytes that `peak_and_largest` returns of a row and segment."""
    return 3 + size // 2


@define("peak_and_largest")
def peak_and_largest(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
    size: int,
) -> Tensor:
    """The peak and the `size` largest values of each row and segment.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: see `values`.
        size: a power of two, at least 2.

    Returns:
        [R, S, n] int64, n as `listed_integers` has it: the two of `peak`; how many more tokens have
        the last of the values; and those, two float32 in one integer, the largest first, -inf where
        there are no more.
    """
    value_RSv = values(x_NSv, first_id_S, rows_R, edits, vocab_size)
    missing = max(size - value_RSv.shape[2], 0)
    top_RSn = pad(value_RSv, (0, missing), value=-torch.inf).topk(size, sorted=True).values
    last_RS1 = top_RSn[..., -1:]
    tied_RS1 = (value_RSv == last_RS1).sum(2, keepdim=True) - (top_RSn == last_RS1).sum(2, True)
    tied_RS1.masked_fill_(last_RS1 == -torch.inf, 0)
    nans_RS = count_nans(x_NSv, first_id_S, rows_R, vocab_size)
    peak_RS2 = packed_peaks(value_RSv, first_id_S, nans_RS)
    return torch.cat([peak_RS2, tied_RS1, top_RSn.view(torch.int64)], 2)


@peak_and_largest.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
    size: int,
) -> Tensor:
    shape = (count_rows(x_NSv, rows_R), x_NSv.shape[1], listed_integers(size))
    return x_NSv.new_empty(shape, dtype=torch.int64)


@define("cut")
def cut(
    listed_RSn: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The thresholds of rows by top-k, and by top-p on what that left.

    Args:
        listed_RSn: [R, S, n] int64, of all segments, any strides, see `peak_and_largest`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`; floors are min-p's.
        top_k_R: [R] int64, at most `size`, or off; off if >= vocab_size.
        top_p_R: [R] int64, fixed point of 31 bits; off if top_k is more than `size`.
        vocab_size: V.

    Returns:
        [R] float32, the value at or above which tokens are kept.
    """
    tied_RS, top_RSn = listed_RSn[..., 2], listed_RSn[..., 3:].contiguous().view(torch.float32)
    value_RN = top_RSn.flatten(1).sort(1, descending=True).values
    kept_R = torch.minimum((value_RN > -torch.inf).sum(1), top_k_R)
    kth_R = value_RN.gather(1, (kept_R - 1).clamp(min=0)[:, None])[:, 0]
    filtered_R = (top_k_R < vocab_size) & (kept_R > 0)
    floor_R = torch.where(filtered_R, torch.maximum(floor_R, kth_R), floor_R)

    def weigh(values_RN: Tensor) -> Tensor:
        return weights(values_RN[:, None], peak_R, floor_R, scale_R, vocab_size)[:, 0]

    amount_RN = weigh(value_RN)
    last_RS = top_RSn[..., -1].contiguous()
    more_RS = weigh(last_RS) * tied_RS
    reached_RN = amount_RN.cumsum(1)
    for last_R, more_R in zip(last_RS.unbind(1), more_RS.unbind(1), strict=True):
        reached_RN = reached_RN + more_R[:, None] * (last_R[:, None] >= value_RN)
    target_R = fraction(amount_RN.sum(1) + more_RS.sum(1), top_p_R)
    beyond_R = (reached_RN < target_R[:, None]).sum(1).clamp(max=value_RN.shape[1] - 1)
    nucleus_R = value_RN.gather(1, beyond_R[:, None])[:, 0]
    filtered_R = (top_p_R < TOP_P_ONE) & (kept_R > 0)
    return torch.where(filtered_R, torch.maximum(floor_R, nucleus_R), floor_R.clone())


@cut.register_fake
def _(
    listed_RSn: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    vocab_size: int,
) -> Tensor:
    return torch.empty_like(floor_R)


def fraction(mass_R: Tensor, top_p_R: Tensor) -> Tensor:
    """ceil(top_p * mass / 2**31), at least 1, for top_p <= 2**31 and mass <= 2**62."""
    high_R, low_R = mass_R >> 31, mass_R & (1 << 31) - 1
    return (top_p_R * high_R + (top_p_R * low_R + (1 << 31) - 1 >> 31)).clamp(min=1)


shard_like(
    torch.ops.dtensor_sample.peak_and_largest.default, "row_segment", "logits segment - - - -"
)
shard_like(torch.ops.dtensor_sample.cut.default, "row", "row row row row row row -")

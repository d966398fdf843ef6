"""A row's shortlist: its peak and the largest values of its segments, and what follows from them.

The k largest logits of a row are among the k largest of each of its segments. So where a row is
sharded and top-k keeps few tokens, ranks need to exchange no more than those: from them follow
top-k's threshold, top-p's on what top-k left, and the masses of all that is kept, part by part.
Tokens tied with the last one listed are counted, so all are exact for every row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_sample.ops.define import define
from dtensor_sample.ops.parts import PARTS, part_sums, part_width
from dtensor_sample.ops.peak import LAST_ID, pack_value, packed_peaks
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_nans, count_rows, values, weights

TOP_P_ONE = 1 << 31
"""top_p as a fixed-point number of 31 fractional bits: this is 1, the filter off."""


def shortlist_integers(size: int) -> int:
    """Integers of 8 bytes that `shortlist` returns of a row and segment."""
    return 2 + PARTS // 2 + size // 2 + size // 8


def shortlist_fields(listed_RSn: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of what `shortlist` returns, the last dim of stride 1.

    Returns:
        [R, S, 2] int64, as `peak` has them; [R, S, size] float32 values, the largest first, -inf
        where there are no more; [R, S, size] uint8 parts that hold them, PARTS for those that equal
        the last one; [R, S, PARTS] int32, how many tokens of each part equal the last one, 0 if
        that is -inf.
    """
    size = (listed_RSn.shape[2] - shortlist_integers(0)) * 8 // 5
    peak_RS2, tied, value, part = listed_RSn.split([2, PARTS // 2, size // 2, size // 8], 2)
    return peak_RS2, value.view(torch.float32), part.view(torch.uint8), tied.view(torch.int32)


@define("shortlist")
def shortlist(
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
        size: a power of two, at least 8.

    Returns:
        [R, S, n] int64, with n and the fields packed therein as `shortlist_integers` and
        `shortlist_fields` have them.
    """
    value_RSv = values(x_NSv, first_id_S, rows_R, edits, vocab_size)
    missing = max(size - value_RSv.shape[2], 0)
    top_RSn, column_RSn = pad(value_RSv, (0, missing), value=-torch.inf).topk(size, sorted=True)
    last_RS1 = top_RSn[..., -1:]
    part_RSn = torch.where(top_RSn > last_RS1, column_RSn // part_width(value_RSv.shape[2]), PARTS)
    packed_RSn = pack_value(top_RSn, part_RSn).sort(2, descending=True).values
    part_RSn = LAST_ID - (packed_RSn & LAST_ID)  # those of equal values in order, too
    tied_RSv = (value_RSv == last_RS1) & (last_RS1 > -torch.inf)
    nans_RS = count_nans(x_NSv, first_id_S, rows_R, vocab_size)
    peak_RS2 = packed_peaks(value_RSv, first_id_S, nans_RS)
    tied_RSC = part_sums(tied_RSv.to(torch.int32)).to(torch.int32)
    fields = (peak_RS2, tied_RSC, top_RSn, part_RSn.to(torch.uint8))
    return torch.cat([field.view(torch.int64) for field in fields], 2)


@shortlist.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
    size: int,
) -> Tensor:
    shape = (count_rows(x_NSv, rows_R), x_NSv.shape[1], shortlist_integers(size))
    return x_NSv.new_empty(shape, dtype=torch.int64)


@define("sift")
def sift(
    listed_RSn: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The thresholds of rows by top-k, and by top-p on what that left; and the masses of both.

    Args:
        listed_RSn: [R, S, n] int64, of all segments, any strides, see `shortlist`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`; floors are min-p's.
        top_k_R: [R] int64, at most `size`, or off; off if >= vocab_size.
        top_p_R: [R] int64, fixed point of 31 bits; off if top_k is more than `size`.
        vocab_size: V.

    Returns:
        [R] float32, the value at or above which tokens are kept; and [R, S, PARTS] int64, as `mass`
        has them, of rows with a top-k of at most `size`; of others without what is not listed.
    """
    _, top_RSn, part_RSn, tied_RSC = shortlist_fields(listed_RSn.contiguous())
    value_RN = top_RSn.flatten(1).sort(1, descending=True).values
    kept_R = torch.minimum((value_RN > -torch.inf).sum(1), top_k_R)
    kth_R = value_RN.gather(1, (kept_R - 1).clamp(min=0)[:, None])[:, 0]
    filtered_R = (top_k_R < vocab_size) & (kept_R > 0)
    floor_R = torch.where(filtered_R, torch.maximum(floor_R, kth_R), floor_R)

    def weigh(values_RN: Tensor, floor_R: Tensor) -> Tensor:
        return weights(values_RN[:, None], peak_R, floor_R, scale_R, vocab_size)[:, 0]

    amount_RN = weigh(value_RN, floor_R)
    last_RS = top_RSn[..., -1].contiguous()
    more_RS = weigh(last_RS, floor_R) * (tied_RSC.sum(2) - (part_RSn == PARTS).sum(2))
    reached_RN = amount_RN.cumsum(1)
    for last_R, more_R in zip(last_RS.unbind(1), more_RS.unbind(1), strict=True):
        reached_RN = reached_RN + more_R[:, None] * (last_R[:, None] >= value_RN)
    target_R = fraction(amount_RN.sum(1) + more_RS.sum(1), top_p_R)
    beyond_R = (reached_RN < target_R[:, None]).sum(1).clamp(max=value_RN.shape[1] - 1)
    nucleus_R = value_RN.gather(1, beyond_R[:, None])[:, 0]
    filtered_R = (top_p_R < TOP_P_ONE) & (kept_R > 0)
    floor_R = torch.where(filtered_R, torch.maximum(floor_R, nucleus_R), floor_R.clone())
    mass_RSC = pad(weigh(last_RS, floor_R)[..., None] * tied_RSC, (0, 1))
    weight_RSn = weigh(top_RSn.flatten(1), floor_R).view(top_RSn.shape)
    mass_RSC.scatter_add_(2, part_RSn.to(torch.int64), weight_RSn)
    return floor_R, mass_RSC[..., :PARTS].contiguous()


@sift.register_fake
def _(
    listed_RSn: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(floor_R), listed_RSn.new_empty((*listed_RSn.shape[:2], PARTS))


def fraction(mass_R: Tensor, top_p_R: Tensor) -> Tensor:
    """ceil(top_p * mass / 2**31), at least 1, for top_p <= 2**31 and mass <= 2**62."""
    high_R, low_R = mass_R >> 31, mass_R & (1 << 31) - 1
    return (top_p_R * high_R + (top_p_R * low_R + (1 << 31) - 1 >> 31)).clamp(min=1)


shard_like(torch.ops.dtensor_sample.shortlist.default, "row_segment", "logits segment - - - -")
shard_like(torch.ops.dtensor_sample.sift.default, "row row", "row row row row row row -")

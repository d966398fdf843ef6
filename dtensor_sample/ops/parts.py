"""How a segment of logits is cut into parts, whose sums are kept between passes.

Sums over rows are taken part by part. So the token that a uniform number points at is found by
reading one part again, not the row; and with few rows there are still many parts to share out.
Every segment has the same number of parts, whatever its width, so that ranks whose vocabulary
shards differ in width still exchange equal shapes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_sample.random import scaled

PARTS = 16
"""Parts of each segment: 8080 logits each for a vocabulary of 129280 on one rank."""
ALIGNMENT = 16
"""Parts begin at multiples of it, for wide loads."""


def part_width(width: int) -> int:
    """Columns of each part of a segment of `width` columns; the last parts may be shorter."""
    return -(-width // (PARTS * ALIGNMENT)) * ALIGNMENT


def part_sums(amount_RSv: Tensor) -> Tensor:
    """[R, S, PARTS]: int64 amounts summed over each part of each segment."""
    width = amount_RSv.shape[2]
    missing = PARTS * part_width(width) - width
    sum_RSC: Tensor = pad(amount_RSv, (0, missing)).unflatten(2, (PARTS, -1)).sum(3)
    return sum_RSC


def aim(
    sum_RPC: Tensor, first_segment: int, segments: int, uniform_R: Tensor
) -> tuple[Tensor, Tensor]:
    """From uniform numbers to points in rows' running sums, and where the parts here begin in them.

    Args:
        sum_RPC: [R, P, PARTS] int64, sums of all parts in vocabulary order; a row's total is at
            most 2**62.
        first_segment: which of the P segments is the first one here.
        segments: S, how many are here.
        uniform_R: [R] int64 in [0, 2**62).

    Returns:
        [R, S, PARTS] int64, the sum of everything before each part here; and [R] int64, the point:
        floor(uniform * total / 2**62), below the total unless that is 0.

    Example: parts that sum to [4, 0, 2] start at [0, 4, 4], and a uniform of 2**61 points at 3.
    """
    flat_RG = sum_RPC.flatten(1)
    start_RPC = (flat_RG.cumsum(1) - flat_RG).view(sum_RPC.shape)
    here_RSC = start_RPC[:, first_segment : first_segment + segments]
    return here_RSC, scaled(uniform_R, flat_RG.sum(1))


def part_of(start_RSC: Tensor, point_R: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """[R, W] segments and columns of the part that holds each row's point, if one here does.

    Where none does the columns are none of the segment's or, after the last part here, hold less.

    Args:
        start_RSC: [R, S, PARTS] int64, the sum of everything before each part (see `aim`).
        point_R: [R] int64.
        width: columns of a segment.
    """
    # The last part to begin at or before the point: those with the same start are empty.
    at_R1 = ((start_RSC.flatten(1) <= point_R[:, None]).sum(1) - 1)[:, None]
    columns, place_W = part_width(width), torch.arange(part_width(width), device=point_R.device)
    column_RW = torch.where(at_R1 < 0, -1, at_R1 % PARTS * columns + place_W)
    return (at_R1.clamp(min=0) // PARTS).expand_as(column_RW), column_RW


def first_beyond(amount_RW: Tensor, start_RSC: Tensor, point_R: Tensor, id_RW: Tensor) -> Tensor:
    """[R] int64: the lowest id whose running sum exceeds the point, -1 if none of these does.

    Args:
        amount_RW: [R, W] int64, >= 0, of the columns that `part_of` gives.
        start_RSC, point_R: see `part_of`.
        id_RW: [R, W] int64.
    """
    before_R = start_RSC.flatten(1).masked_fill(start_RSC.flatten(1) > point_R[:, None], 0).amax(1)
    hit_RW = before_R[:, None] + amount_RW.cumsum(1) > point_R[:, None]
    nowhere = torch.iinfo(torch.int64).max
    id_R = torch.where(hit_RW, id_RW, nowhere).amin(1)
    return torch.where(id_R == nowhere, -1, id_R)

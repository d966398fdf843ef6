"""How a segment of logits is cut into parts, whose sums are kept between passes.

Sums over rows are taken part by part. So the token that a uniform number points at is found by
reading one part again, not the row; and with few rows there are still many parts to share out.
Every segment has the same number of parts, whatever its width, so that ranks whose vocabulary
shards differ in width still exchange equal shapes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

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


def first_beyond(amount_RSv: Tensor, start_RSC: Tensor, point_R: Tensor, id_Sv: Tensor) -> Tensor:
    """[R] int64: the lowest id whose running sum exceeds the point, -1 if none of these does.

    Args:
        amount_RSv: [R, S, v] int64, >= 0.
        start_RSC: [R, S, PARTS] int64, the sum of everything before each part (see `aim`).
        point_R: [R] int64.
        id_Sv: [S, v] int64.
    """
    point_R11, start_RS1 = point_R[:, None, None], start_RSC[:, :, :1]
    hit_RSv = (amount_RSv.cumsum(2) + start_RS1 > point_R11) & (start_RS1 <= point_R11)
    nowhere = torch.iinfo(torch.int64).max
    id_R = torch.where(hit_RSv, id_Sv, nowhere).amin((1, 2))
    return torch.where(id_R == nowhere, -1, id_R)

"""The largest logit of each row and segment, its lowest id, and the count of NaNs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import (
    count_nans,
    count_rows,
    from_ordered_keys,
    ordered_keys,
    values,
)

_ID_BITS = 31
LAST_ID = (1 << _ID_BITS) - 1
"""The largest id that a packed peak has room for."""


@define("peak")
def peak(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
) -> Tensor:
    """The peak of each row and segment, packed so that a maximum over int64 combines segments.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: see `values`.

    Returns:
        [R, S, 2] int64: `key << 31 | (2**31 - 1 - id)`, where key orders like the value, so that
        the maximum is the largest value at its lowest id; and the number of NaN logits.

    Example: for logits [1, 7, 7] the packed maximum holds the key of 7.0 and id 1.
    """
    value_RSv = values(x_NSv, first_id_S, rows_R, edits, vocab_size)
    return packed_peaks(value_RSv, first_id_S, count_nans(x_NSv, first_id_S, rows_R, vocab_size))


@peak.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
) -> Tensor:
    return x_NSv.new_empty((count_rows(x_NSv, rows_R), x_NSv.shape[1], 2), dtype=torch.int64)


def packed_peaks(value_RSv: Tensor, first_id_S: Tensor, nans_RS: Tensor) -> Tensor:
    """What `peak` returns, of values and NaN counts."""
    value_RS, column_RS = value_RSv.max(2)  # the first of equal ones
    return torch.stack([pack_value(value_RS, first_id_S + column_RS), nans_RS], 2)


def pack_value(value: Tensor, ids: Tensor) -> Tensor:
    """Values and ids as int64 that order by value, equal ones by the lower id."""
    return ordered_keys(value) << _ID_BITS | LAST_ID - ids.clamp(max=LAST_ID)


def unpack_peak(packed_R: Tensor) -> tuple[Tensor, Tensor]:
    """(value float32, id int64) of packed peaks; id -1 and value -inf where a row has no token."""
    value_R = from_ordered_keys(packed_R >> _ID_BITS)
    return value_R, torch.where(value_R > -torch.inf, LAST_ID - (packed_R & LAST_ID), -1)


@define("join_peaks")
def join_peaks(peaks_RS2: Tensor, min_p_R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the peaks of all segments say of each row.

    Args:
        peaks_RS2: [R, S, 2] int64, as `peak` returns it, any strides.
        min_p_R: [R] float32, see `RowParams`.

    Returns:
        [R] float32 peaks, -inf without a token, and min-p's thresholds; [R] int64 argmaxes, -1
        without a token, and NaN counts.
    """
    packed_RS, nans_RS = peaks_RS2.unbind(2)
    peak_R, argmax_R = unpack_peak(packed_RS.amax(1))
    return peak_R, peak_R + min_p_R, argmax_R, nans_RS.sum(1)


@join_peaks.register_fake
def _(peaks_RS2: Tensor, min_p_R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    peak_R, floor_R = torch.empty_like(min_p_R), torch.empty_like(min_p_R)
    argmax_R, nans_R = (peaks_RS2.new_empty(peaks_RS2.shape[0]) for _ in range(2))
    return peak_R, floor_R, argmax_R, nans_R


shard_like(torch.ops.dtensor_sample.peak.default, "row_segment", "logits segment - - -")
shard_like(torch.ops.dtensor_sample.join_peaks.default, "row row row row", "row row")

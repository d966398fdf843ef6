"""What changes the values of a row before anything is decided: biases, penalties, bans and masks.

Edits are applied wherever a logit is read, so that no edited copy of the logits exists. Ops take
them as one list of tensors, empty where nothing is edited. What `dtensor_sample.process` builds
such lists from, requests ask for; here is only how a value follows from them.

Every operation rounds once, in float32, in the order in which it is written; a kernel that edits
values has the same operations. So an edited value, too, has the same bits wherever it is computed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

IN_PROMPT = 1 << 30
"""The bit of a count that says: the id is in the prompt. Lower bits count it in the output."""
_LARGEST = torch.finfo(torch.float32).max


class Edits(NamedTuple):
    """Edits of R rows, as a list of tensors: what E edited rows ask for, and M wide rows.

    What no row asks for has no elements.
    """

    row_R: Tensor
    """int64: which of the E each row is; -1: it is not edited."""
    table_E: Tensor
    """int64: its row of the wide tables; -1: it has none."""
    rates_E3: Tensor
    """float32: repetition, frequency and presence penalty."""
    drafts_EK: Tensor
    """int64: draft tokens before the row, which count as output; -1 elsewhere."""
    banned_EB: Tensor
    """int64: ids that become -inf; -1 elsewhere."""
    mask_E: Tensor
    """int64: its row of the packed masks; -1: every id is allowed."""
    bias_MW: Tensor
    """float32 added to each value, -inf for a ban; the W ids from the first of the logits on."""
    counts_MW: Tensor
    """int32: how often each id was emitted, and `IN_PROMPT`; ids as in `bias_MW`."""
    mask_GX: Tensor
    """int32: bit i % 32 of word i // 32 allows the i-th id from `mask_id` on."""
    mask_id_1: Tensor
    """int64: the id of the first bit. Ids beyond all bits are not allowed."""

    @staticmethod
    def none(rows: int, device: torch.device) -> "Edits":
        """Edits of rows of which none is edited; where there are no counts, rates mean nothing.

        No tensor is there twice: the compiler would guard that, and torch 2.13 fails to say so.
        """
        number_R = torch.arange(rows, device=device)
        table_E, mask_E = (torch.full_like(number_R, -1) for _ in range(2))
        drafts_EK, banned_EB = (number_R.new_empty((rows, 0)) for _ in range(2))
        counts_MW, mask_GX = (number_R.new_empty((0, 0), dtype=torch.int32) for _ in range(2))
        return Edits(
            row_R=number_R,
            table_E=table_E,
            rates_E3=torch.ones((rows, 3), device=device),
            drafts_EK=drafts_EK,
            banned_EB=banned_EB,
            mask_E=mask_E,
            bias_MW=number_R.new_empty((0, 0), dtype=torch.float32),
            counts_MW=counts_MW,
            mask_GX=mask_GX,
            mask_id_1=number_R.new_zeros(1),
        )

    @property
    def rounded(self) -> bool:
        """Whether values may be other numbers than logits, in float32."""
        return self.bias_MW.numel() > 0 or self.counts_MW.numel() > 0

    def at(self, index_Q: Tensor | slice) -> "Edits":
        """The edits of other rows: row `index` for each."""
        return self._replace(row_R=self.row_R[index_Q])


def edited(
    value_RX: Tensor, column_RX: Tensor, first_id_S: Tensor, edits: Sequence[Tensor]
) -> Tensor:
    """Values after the edits of their rows.

    In this order: the bias is added; if the id is in the prompt, the output or the drafts before, a
    value above 0 is divided by the repetition penalty and another multiplied; the frequency penalty
    times the count in output and drafts is subtracted, then the presence penalty if that is not 0.
    What overflows float32 becomes its largest or least finite number. -inf, a bias of -inf, a
    banned id and one that the mask does not allow give -inf. -0 is +0.

    Args:
        value_RX: [R, X] float32 without NaN and +inf.
        column_RX: [R, X] or [1, X] int64: each value's id, less the first one of the logits.
        first_id_S: [S] int64, see `values`.
        edits: the fields of an `Edits`, or nothing.
    """
    if not edits:
        return value_RX
    of = Edits(*edits)
    if of.table_E.shape[0] == 0:
        return value_RX
    row_R, known_R1 = of.row_R.clamp(min=0), (of.row_R >= 0)[:, None]
    table_R1 = of.table_E[row_R][:, None]
    id_RX = first_id_S[0] + column_RX
    banned_RX = value_RX == -torch.inf

    def wide(x_MW: Tensor) -> Tensor:
        """[R, X] entries of a wide table; 0 where there are none."""
        inside_RX = known_R1 & (table_R1 >= 0) & (column_RX >= 0) & (column_RX < x_MW.shape[1])
        found_RX = x_MW[table_R1.clamp(min=0), column_RX.clamp(0, x_MW.shape[1] - 1)]
        return torch.where(inside_RX, found_RX, 0)

    if of.bias_MW.numel():
        bias_RX = wide(of.bias_MW)
        banned_RX = banned_RX | (bias_RX == -torch.inf)
        value_RX = value_RX + bias_RX
    if of.counts_MW.numel():
        packed_RX = wide(of.counts_MW)
        count_RX = packed_RX & IN_PROMPT - 1
        for draft_R in of.drafts_EK[row_R].unbind(1):
            count_RX = count_RX + (known_R1 & (draft_R[:, None] == id_RX))
        seen_RX = (packed_RX >= IN_PROMPT) | (count_RX > 0)
        repetition_R1, frequency_R1, presence_R1 = of.rates_E3[row_R].split(1, 1)
        repeated_RX = torch.where(value_RX > 0, value_RX / repetition_R1, value_RX * repetition_R1)
        value_RX = torch.where(seen_RX, repeated_RX, value_RX)
        value_RX = value_RX - count_RX.to(torch.float32) * frequency_R1
        value_RX = torch.where(count_RX > 0, value_RX - presence_R1, value_RX)
    for banned_R in torch.where(known_R1, of.banned_EB[row_R], -1).unbind(1):
        banned_RX |= banned_R[:, None] == id_RX
    if of.mask_GX.numel():
        mask_R1 = torch.where(known_R1, of.mask_E[row_R][:, None], -1)
        bit_RX = id_RX - of.mask_id_1
        word_RX = bit_RX >> 5
        inside_RX = (word_RX >= 0) & (word_RX < of.mask_GX.shape[1])
        word_RX = of.mask_GX[mask_R1.clamp(min=0), word_RX.clamp(0, of.mask_GX.shape[1] - 1)]
        allowed_RX = inside_RX & (word_RX >> (bit_RX & 31) & 1 == 1)
        banned_RX = banned_RX | ((mask_R1 >= 0) & ~allowed_RX)
    return value_RX.clamp(-_LARGEST, _LARGEST).add(0.0).masked_fill(banned_RX, -torch.inf)

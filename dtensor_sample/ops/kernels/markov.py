"""Low-rank biases added to base logits.

Integer products are exact, so tiles may be of any size. Factors lie row after row, as tensor cores
want both sides of a product of eight-bit integers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.values import nearest

_INF = tl.constexpr(float("inf"))
_COLUMNS = 128
_FACTORS = 128


@kernel
def _markov_kernel(
    x_ptr,  # [Q, S, v] base logits
    stride_q,
    stride_s,
    stride_v,
    floor_ptr,  # [Q] float32, or unused
    before_ptr,  # [Q] int64
    left_ptr,  # [V, F] int8
    left_scale_ptr,  # [V] float32
    right_ptr,  # [D, F] int8
    right_scale_ptr,  # [D] float32
    target_ptr,  # [D] int64, or unused
    value_ptr,  # out: [Q, W]
    rows,  # Q
    blocks,  # of rows
    width,  # v
    columns,  # D
    value_width,  # W
    F: tl.constexpr,
    FACTORS: tl.constexpr,  # of one product
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of rows and columns; tiles of the same columns follow one another.

    Example: factors [2, 1] and [3, 5] with scales 0.5 and 1 add 5.5 to a logit.
    """
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // blocks * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.load(before_ptr + row, mask=row < rows, other=-1)
    known, present = before >= 0, column < columns
    factor = tl.arange(0, FACTORS)
    product = tl.zeros([ROWS, COLUMNS], tl.int32)
    left = left_ptr + before[:, None] * F + factor[None, :]
    right = right_ptr + column.to(tl.int64)[:, None] * F + factor[None, :]
    for begin in tl.static_range(0, F, FACTORS):
        a = tl.load(left + begin, mask=known[:, None], other=0)
        b = tl.load(right + begin, mask=present[:, None], other=0)
        product = tl.dot(a, tl.trans(b), product, out_dtype=tl.int32)
    left_scale = tl.load(left_scale_ptr + before, mask=known, other=0.0)
    right_scale = tl.load(right_scale_ptr + column, mask=present, other=0.0)

    wanted = known[:, None] & present[None, :]
    place = (column // width).to(tl.int64) * stride_s + (column % width).to(tl.int64) * stride_v
    x = x_ptr + row.to(tl.int64)[:, None] * stride_q + place[None, :]
    base = tl.load(x, mask=wanted, other=-_INF).to(tl.float32)
    value = base + product.to(tl.float32) * left_scale[:, None] * right_scale[None, :]
    if floor_ptr is not None:
        floor = tl.load(floor_ptr + row, mask=row < rows, other=0.0)
        value = tl.where(base < floor[:, None], -_INF, value)
    value = tl.where(known[:, None], value, -_INF)
    if target_ptr is not None:
        to = tl.load(target_ptr + column, mask=present, other=0)
    else:
        to = column.to(tl.int64)
    out = value_ptr + row.to(tl.int64)[:, None] * value_width + to[None, :]
    exists = (row < rows)[:, None] & present[None, :]
    tl.store(out, nearest(value, value_ptr.dtype.element_ty), mask=exists)


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
    """The kernel of `ops.markov`; factors are int8, and F is a power of two >= 32."""
    (Q, _, v), (D, F) = x_QSv.shape, right_DF.shape
    if width == D and target_D is None:
        value_QW = x_QSv.new_empty((Q, width))
    else:
        value_QW = x_QSv.new_full((Q, width), -torch.inf)
    if Q > 0 and D > 0:
        size = min(max(triton.next_power_of_2(Q), 16), 64)
        blocks = triton.cdiv(Q, size)
        _markov_kernel[(blocks * triton.cdiv(D, _COLUMNS),)](
            x_QSv,
            *x_QSv.stride(),
            floor_Q,
            before_Q.contiguous(),
            left_VF,
            left_scale_V,
            right_DF,
            right_scale_D,
            target_D,
            value_QW,
            Q,
            blocks,
            v,
            D,
            width,
            F=F,
            FACTORS=min(F, _FACTORS),
            ROWS=size,
            COLUMNS=_COLUMNS,
            enable_fp_fusion=False,
        )
    return value_QW

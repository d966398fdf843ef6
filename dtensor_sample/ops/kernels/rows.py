"""A few numbers a row: of its request, uniform integers, peaks, copies, and what is delivered."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.deliver import OUTCOME_COLUMNS
from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.random import counted
from dtensor_sample.ops.largest import TOP_P_ONE
from dtensor_sample.ops.peak import LAST_ID

_ROWS = 128
_FEW_ROWS = 8
_INF = tl.constexpr(float("inf"))
_LAST_ID = tl.constexpr(LAST_ID)


@kernel
def _row_params_kernel(
    table_ptr,  # [M, 6] int64
    row_ptr,  # [R] int64, or unused
    position_ptr,  # [X] int64
    place_ptr,  # [R] int64, or unused
    offset_ptr,  # [R] int64, or unused
    scale_ptr,  # out: [R] float32
    min_p_ptr,  # out: [R] float32
    top_k_ptr,  # out: [R] int64
    top_p_ptr,  # out: [R] int64
    seed_ptr,  # out: [R] int64
    greedy_ptr,  # out: [R] bool
    emitted_ptr,  # out: [R] int64
    uniform_ptr,  # out: [R] int64, or unused
    step,  # place within a block of drafts
    rows,  # R
    STREAM: tl.constexpr,  # of the uniform numbers; None: none are wanted
    TOP_P_ONE: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
):
    """Rows of a table, see `ops.row_params`.

    Example: a table with top-k 0 and top-p 2**40 gives top-k 1 and top-p 2**31.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    source, place = row, row
    if row_ptr is not None:
        source = tl.load(row_ptr + row, mask=exists, other=0)
    if place_ptr is not None:
        place = tl.load(place_ptr + row, mask=exists, other=0)
    position = tl.load(position_ptr + place, mask=exists, other=0)
    if offset_ptr is not None:
        position += tl.load(offset_ptr + row, mask=exists, other=0)
    entry = table_ptr + source * 6
    scale = tl.load(entry, mask=exists, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    min_p = tl.load(entry + 1, mask=exists, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    top_k = tl.maximum(tl.load(entry + 2, mask=exists, other=0), 1)
    top_p = tl.minimum(tl.maximum(tl.load(entry + 3, mask=exists, other=0), 0), TOP_P_ONE)
    tl.store(scale_ptr + row, scale, mask=exists)
    tl.store(min_p_ptr + row, min_p, mask=exists)
    tl.store(top_k_ptr + row, top_k, mask=exists)
    tl.store(top_p_ptr + row, top_p, mask=exists)
    seed = tl.load(entry + 4, mask=exists, other=0)
    tl.store(seed_ptr + row, seed, mask=exists)
    greedy = tl.load(entry + 5, mask=exists, other=0) != 0
    tl.store(greedy_ptr + row, greedy, mask=exists)
    tl.store(emitted_ptr + row, position, mask=exists)
    if STREAM is not None:
        zeros = tl.zeros_like(seed)
        uniform = counted(seed, position, zeros + step, zeros + STREAM)
        tl.store(uniform_ptr + row, uniform, mask=exists)


@kernel
def _uniform_kernel(
    seed_ptr,  # [R] int64
    position_ptr,  # [R] int64
    offset_ptr,  # [R] int64
    uniform_ptr,  # out: [R] int64
    rows,  # R
    STREAM: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
):
    """A number for each row, see `counted`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    seed = tl.load(seed_ptr + row, mask=row < rows, other=0)
    position = tl.load(position_ptr + row, mask=row < rows, other=0)
    offset = tl.load(offset_ptr + row, mask=row < rows, other=0)
    uniform = counted(seed, position, offset, tl.zeros_like(seed) + STREAM)
    tl.store(uniform_ptr + row, uniform, mask=row < rows)


@kernel
def _join_peaks_kernel(
    packed_ptr,  # [R, S, 2] int64
    row_stride,
    segment_stride,
    min_p_ptr,  # [R] float32
    peak_ptr,  # out: [R] float32
    floor_ptr,  # out: [R] float32
    argmax_ptr,  # out: [R] int64
    nans_ptr,  # out: [R] int64
    rows,  # R
    segments,  # S
    ALL_SEGMENTS: tl.constexpr,  # S, rounded up to a power of two
    ROWS: tl.constexpr,  # rows of a program
):
    """The largest of a row's packed peaks, unpacked, and the sum of its NaN counts.

    Example: segments whose peaks are 7.0 at id 3 and 7.0 at id 9 give 7.0 at id 3.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    segment = tl.arange(0, ALL_SEGMENTS)[None, :]
    exists = (row < rows)[:, None] & (segment < segments)
    entry = packed_ptr + row[:, None] * row_stride + segment.to(tl.int64) * segment_stride
    packed = tl.max(tl.load(entry, mask=exists, other=0), 1)
    nans = tl.sum(tl.load(entry + 1, mask=exists, other=0), 1)
    key = packed >> 31
    bits = tl.where(key >= 1 << 31, key - (1 << 31), -1 - key)
    peak = bits.to(tl.int32).to(tl.float32, bitcast=True)
    argmax = tl.where(peak > -_INF, _LAST_ID - (packed & _LAST_ID), -1)
    own = row < rows
    tl.store(peak_ptr + row, peak, mask=own)
    tl.store(floor_ptr + row, peak + tl.load(min_p_ptr + row, mask=own, other=0.0), mask=own)
    tl.store(argmax_ptr + row, argmax, mask=own)
    tl.store(nans_ptr + row, nans, mask=own)


@kernel
def _take_kernel(
    index_ptr,  # [Q] int64
    wanted_ptr,  # [Q] bool, or unused: all are
    rows_ptr,  # [R] int64, or unused
    peak_ptr,  # [R] float32
    floor_ptr,  # [R] float32
    scale_ptr,  # [R] float32
    mass_ptr,  # [R, P, C] int64
    row_stride,
    segment_stride,
    argmax_ptr,  # [R] int64
    nans_ptr,  # [R] int64
    taken_ptr,  # out: [Q] int64
    taken_peak_ptr,  # out: [Q] float32, and so on
    taken_floor_ptr,
    taken_scale_ptr,
    taken_mass_ptr,  # out: [Q, P, C]
    taken_argmax_ptr,
    taken_nans_ptr,
    parts,  # P * C
    PARTS: tl.constexpr,  # C, or 1 without any
    ALL_PARTS: tl.constexpr,  # P * C, rounded up to a power of two
):
    """One row of all fields.

    Example: index 5 that is not wanted takes the fields of row 5, and lies nowhere.
    """
    to = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + to)
    row = tl.maximum(index, 0)
    source = row
    if rows_ptr is not None:
        source = tl.load(rows_ptr + row)
    wanted = index >= 0
    if wanted_ptr is not None:
        wanted = wanted & (tl.load(wanted_ptr + to) != 0)
    tl.store(taken_ptr + to, tl.where(wanted, source, -1))
    tl.store(taken_peak_ptr + to, tl.load(peak_ptr + row))
    tl.store(taken_floor_ptr + to, tl.load(floor_ptr + row))
    tl.store(taken_scale_ptr + to, tl.load(scale_ptr + row))
    tl.store(taken_argmax_ptr + to, tl.load(argmax_ptr + row))
    tl.store(taken_nans_ptr + to, tl.load(nans_ptr + row))
    part = tl.arange(0, ALL_PARTS)
    entry = mass_ptr + row * row_stride + (part // PARTS).to(tl.int64) * segment_stride
    mass = tl.load(entry + part % PARTS, mask=part < tl.where(index >= 0, parts, 0), other=0)
    tl.store(taken_mass_ptr + to * parts + part, mass, mask=part < parts)


@kernel
def _deliver_kernel(
    result_ptr,  # [T, W] int64
    src_ptr,  # [B] int64
    slot_ptr,  # [B] int64
    position_ptr,  # changed: [M] int64, or unused
    token_ptr,  # out: [B, tokens] int64
    sampled_ptr,  # out: [B] int64
    rejected_ptr,  # out: [B] int64
    nans_ptr,  # out: [B] int64
    failed_ptr,  # out: [B] bool
    requests,  # B
    width,  # W
    tokens,
    COLUMNS: tl.constexpr,  # OUTCOME_COLUMNS
    ALL_TOKENS: tl.constexpr,  # tokens, rounded up to a power of two
    ROWS: tl.constexpr,  # requests of a program
):
    """The fields of some requests.

    Example: of the result [5, 1, 0, 2, 0], two tokens are [5, -1]; 1 is sampled, 0 are rejected.
    """
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = request < requests
    own = result_ptr + tl.load(src_ptr + request, mask=exists, other=0) * width
    place = tl.arange(0, ALL_TOKENS)[None, :]
    there = exists[:, None] & (place < width - COLUMNS)
    token = tl.load(own[:, None] + place, mask=there, other=-1)
    to = token_ptr + request.to(tl.int64)[:, None] * tokens + place
    tl.store(to, token, mask=exists[:, None] & (place < tokens))
    own += width - COLUMNS
    sampled = tl.load(own, mask=exists, other=0)
    tl.store(sampled_ptr + request, sampled, mask=exists)
    if position_ptr is not None:
        slot = tl.load(slot_ptr + request, mask=exists, other=0)
        tl.atomic_add(position_ptr + slot, sampled, mask=exists, sem="relaxed")
    tl.store(rejected_ptr + request, tl.load(own + 1, mask=exists, other=0), mask=exists)
    tl.store(nans_ptr + request, tl.load(own + 2, mask=exists, other=0), mask=exists)
    tl.store(failed_ptr + request, tl.load(own + 3, mask=exists, other=0) != 0, mask=exists)


def row_params(
    table_M6: Tensor,
    row_R: Tensor | None,
    position_X: Tensor,
    place_R: Tensor | None,
    offset_R: Tensor | None,
    stream: int | None,
    step: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `ops.row_params`."""
    rows = table_M6.shape[0] if row_R is None else row_R.shape[0]
    scale_R, min_p_R = (table_M6.new_empty(rows, dtype=torch.float32) for _ in range(2))
    top_k_R, top_p_R, seed_R, emitted_R = (table_M6.new_empty(rows) for _ in range(4))
    greedy_R = table_M6.new_empty(rows, dtype=torch.bool)
    uniform_R = table_M6.new_empty(0 if stream is None else rows)
    found = (scale_R, min_p_R, top_k_R, top_p_R, seed_R, greedy_R, emitted_R, uniform_R)
    if rows > 0:
        _row_params_kernel[(triton.cdiv(rows, _ROWS),)](
            table_M6.contiguous(),
            None if row_R is None else row_R.contiguous(),
            position_X.contiguous(),
            None if place_R is None else place_R.contiguous(),
            None if offset_R is None else offset_R.contiguous(),
            *found,
            step,
            rows,
            STREAM=stream,
            TOP_P_ONE=TOP_P_ONE,
            ROWS=_ROWS,
        )
    return found


def join_peaks(peaks_RS2: Tensor, min_p_R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `ops.join_peaks`."""
    R, S, _ = peaks_RS2.shape
    if peaks_RS2.stride(2) != 1:
        peaks_RS2 = peaks_RS2.contiguous()
    peak_R, floor_R = (min_p_R.new_empty(R) for _ in range(2))
    argmax_R, nans_R = (peaks_RS2.new_empty(R) for _ in range(2))
    if R > 0:
        _join_peaks_kernel[(triton.cdiv(R, _FEW_ROWS),)](
            peaks_RS2,
            *peaks_RS2.stride()[:2],
            min_p_R.contiguous(),
            peak_R,
            floor_R,
            argmax_R,
            nans_R,
            R,
            S,
            ALL_SEGMENTS=triton.next_power_of_2(S),
            ROWS=_FEW_ROWS,
            num_warps=1,
        )
    return peak_R, floor_R, argmax_R, nans_R


def take(
    index_Q: Tensor,
    wanted_Q: Tensor | None,
    rows_R: Tensor | None,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    argmax_R: Tensor,
    nans_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `ops.take`."""
    Q, (P, C) = index_Q.shape[0], mass_RPC.shape[1:]
    if C > 0 and mass_RPC.stride(2) != 1:
        mass_RPC = mass_RPC.contiguous()
    taken_Q, argmax_Q, nans_Q = (index_Q.new_empty(Q) for _ in range(3))
    peak_Q, floor_Q, scale_Q = (peak_R.new_empty(Q) for _ in range(3))
    mass_QPC = index_Q.new_empty((Q, P, C))
    taken = (taken_Q, peak_Q, floor_Q, scale_Q, mass_QPC, argmax_Q, nans_Q)
    if Q > 0:
        _take_kernel[(Q,)](
            index_Q.contiguous(),
            None if wanted_Q is None else wanted_Q.contiguous(),
            rows_R,
            peak_R.contiguous(),
            floor_R.contiguous(),
            scale_R.contiguous(),
            mass_RPC,
            *mass_RPC.stride()[:2],
            argmax_R.contiguous(),
            nans_R.contiguous(),
            *taken,
            P * C,
            PARTS=max(C, 1),
            ALL_PARTS=triton.next_power_of_2(max(P * C, 1)),
            num_warps=1,
        )
    return taken


def uniform(seed_R: Tensor, position_R: Tensor, offset_R: Tensor, stream: int) -> Tensor:
    """The kernel of `ops.uniform`."""
    uniform_R = seed_R.new_empty(seed_R.shape)
    rows = seed_R.shape[0]
    if rows > 0:
        _uniform_kernel[(triton.cdiv(rows, _ROWS),)](
            seed_R.contiguous(),
            position_R.contiguous(),
            offset_R.contiguous(),
            uniform_R,
            rows,
            STREAM=stream,
            ROWS=_ROWS,
        )
    return uniform_R


def deliver(
    result_TW: Tensor,
    src_B: Tensor,
    tokens: int,
    slots_B: Tensor,
    positions_M: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `ops.deliver`."""
    B = src_B.shape[0]
    token_BJ, failed_B = src_B.new_empty((B, tokens)), src_B.new_empty(B, dtype=torch.bool)
    sampled_B, rejected_B, nans_B = (src_B.new_empty(B) for _ in range(3))
    found = (token_BJ, sampled_B, rejected_B, nans_B, failed_B)
    if B > 0:
        _deliver_kernel[(triton.cdiv(B, _FEW_ROWS),)](
            result_TW.contiguous(),
            src_B.contiguous(),
            slots_B.contiguous(),
            positions_M,
            *found,
            B,
            result_TW.shape[1],
            tokens,
            COLUMNS=OUTCOME_COLUMNS,
            ALL_TOKENS=triton.next_power_of_2(tokens),
            ROWS=_FEW_ROWS,
            num_warps=1,
        )
    return found

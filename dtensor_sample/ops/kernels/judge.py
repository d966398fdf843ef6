"""Judging drafts: a program a request, a lane a draft. See `ops/judge.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.judge import ROUNDING
from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.random import counted
from dtensor_sample.ops.residual import ONE
from dtensor_sample.random import COIN, RECOVERY, TARGET

_ONE = tl.constexpr(ONE)
_ROUNDING = tl.constexpr(ROUNDING)
_COIN, _RECOVERY, _TARGET = (tl.constexpr(stream) for stream in (COIN, RECOVERY, TARGET))


@kernel
def _lay_out_kernel(
    begin_ptr,  # [Q + 1] int64
    request_ptr,  # [R] int64
    draft_row_ptr,  # [R] int64
    draft_steps_ptr,  # [R] int64
    one_hot_ptr,  # [B] bool, or unused
    draft_ptr,  # [B, K] int64
    row_ptr,  # out: [Q, J] int64
    count_ptr,  # out: [Q] int64
    token_ptr,  # out: [Q, K] int64
    place_ptr,  # out: [Q, K] int64
    drawn_ptr,  # out: [Q] bool
    list_ptr,  # -1, out: [4, G] int64
    rows,  # R
    K,
    size,  # G
    LANES: tl.constexpr,  # J, rounded up to a power of two
):
    """The rows and drafts of a request.

    Example: the second request, of rows 3 and 4 after one of three rows: its draft is at place 2.
    """
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    begin = tl.load(begin_ptr + request)
    count = tl.load(begin_ptr + request + 1) - begin
    row = tl.minimum(begin + lane, rows - 1)
    first = tl.minimum(begin, rows - 1)
    number = tl.load(request_ptr + first)
    steps = tl.load(draft_steps_ptr + first)
    if one_hot_ptr is not None:
        steps = tl.where(tl.load(one_hot_ptr + number) != 0, 0, steps)
    exists = (lane < K) & (lane + 1 < count)
    token = tl.load(draft_ptr + number * K + lane, mask=lane < K, other=-1)
    place = tl.where(exists, begin - request + lane, size)
    kept = tl.where(lane < steps, tl.load(draft_row_ptr + first) + lane, -1)
    tl.store(row_ptr + request * (K + 1) + lane, row, mask=lane <= K)
    tl.store(count_ptr + request, count)
    tl.store(token_ptr + request * K + lane, token, mask=lane < K)
    tl.store(place_ptr + request * K + lane, place, mask=lane < K)
    tl.store(drawn_ptr + request, steps > 0)
    listed = list_ptr + place
    tl.store(listed, row, mask=exists)
    tl.store(listed + size, token, mask=exists)
    tl.store(listed + 2 * size, tl.where(steps > 0, -1, token), mask=exists)
    tl.store(listed + 3 * size, kept, mask=exists)


@kernel
def _eligible_kernel(
    argmax_ptr,  # [R] int64
    greedy_ptr,  # [R] bool
    mass_ptr,  # [R, P, C] int64
    row_stride,
    segment_stride,
    row_ptr,  # [G] int64
    token_ptr,  # [G] int64
    judged_ptr,  # out: [G] int64
    total_ptr,  # out: [G] int64
    size,  # G
    parts,  # P * C
    vocab_size,
    PARTS: tl.constexpr,  # C, or 1 without any
    ALL_PARTS: tl.constexpr,  # P * C, rounded up to a power of two
    ROWS: tl.constexpr,  # places of a program
):
    """Which drafts can be judged, and the mass of their rows.

    Example: the draft 7 beside a row of masses [4, 2] can, with a total of 6; the draft -1 cannot.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = place < size
    row = tl.load(row_ptr + place, mask=exists, other=-1)
    token = tl.load(token_ptr + place, mask=exists, other=-1)
    exists = exists & (row >= 0)
    known = exists & (token >= 0) & (token < vocab_size)
    known = known & (tl.load(argmax_ptr + row, mask=exists, other=-1) >= 0)
    known = known & (tl.load(greedy_ptr + row, mask=exists, other=1) == 0)
    part = tl.arange(0, ALL_PARTS)[None, :]
    entry = (part // PARTS).to(tl.int64) * segment_stride + part % PARTS
    wanted = exists[:, None] & (part < parts)
    mass = tl.load(mass_ptr + row[:, None] * row_stride + entry, mask=wanted, other=0)
    tl.store(judged_ptr + place, tl.where(known, row, -1), mask=place < size)
    tl.store(total_ptr + place, tl.sum(mass, 1), mask=place < size)


@kernel
def _chances_kernel(
    row_ptr,  # [G] int64
    weight_ptr,  # [G] int64
    total_ptr,  # [G] int64
    draft_weight_ptr,  # [G] int64, or unused
    draft_total_ptr,  # [G] int64, likewise
    drawn_ptr,  # [Q] bool
    row_of_ptr,  # [Q, J] int64
    place_ptr,  # [Q, K] int64
    seed_ptr,  # [R] int64
    position_ptr,  # [R] int64
    target_ptr,  # out: [Q, K] int64
    draft_ptr,  # out: [Q, K] int64
    coin_ptr,  # out: [Q, K] int64
    limit_ptr,  # out: [Q] int64
    K,
    size,  # G
    LANES: tl.constexpr,  # K, rounded up to a power of two
):
    """Probabilities of the drafted tokens of a request, and their coins.

    Example: a weight of 3 out of 4 is 3 * 2**58.
    """
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    there = lane < K
    at = request * K + lane
    place = tl.load(place_ptr + at, mask=there, other=0)
    exists = there & (place < size)
    usable = tl.load(row_ptr + place, mask=exists, other=-1) >= 0
    weight = tl.load(weight_ptr + place, mask=exists, other=0)
    target = _probability(weight, tl.load(total_ptr + place, mask=exists, other=1))
    draft = tl.full([LANES], _ONE, tl.int64)
    if draft_total_ptr is not None:
        drawn = tl.load(drawn_ptr + request) != 0
        weight = tl.load(draft_weight_ptr + place, mask=exists, other=0)
        total = tl.load(draft_total_ptr + place, mask=exists, other=0)
        draft = tl.where(drawn, _probability(weight, total), draft)
        usable = usable & ((drawn == 0) | (total > 0))
    first = tl.load(row_of_ptr + request * (K + 1))
    seed, start = tl.load(seed_ptr + first), tl.load(position_ptr + first)
    zeros = tl.zeros([LANES], tl.int64)
    coin = counted(zeros + seed, zeros + start, lane.to(tl.int64), zeros + _COIN)
    tl.store(target_ptr + at, target, mask=there)
    tl.store(draft_ptr + at, draft, mask=there)
    tl.store(coin_ptr + at, coin, mask=there)
    tl.store(limit_ptr + request, _leading(usable, lane, K))


@kernel
def _prefixes_kernel(
    target_ptr,  # [Q, K] int64
    draft_ptr,  # [Q, K] int64
    coin_ptr,  # [Q, K] int64
    limit_ptr,  # [Q] int64
    place_ptr,  # [Q, K] int64
    joint_ptr,  # out: [Q, K] int64
    ratio_ptr,  # ones, out: [G] int64
    wanted_ptr,  # -1, out: [G] int64
    requests,  # Q
    K,
    size,  # G
    ROWS: tl.constexpr,  # requests of a program
    LANES: tl.constexpr,  # K, rounded up to a power of two
):
    """Joint ratios, one draft after another, and the places whose residuals matter.

    Example: p [1/2, 1], q [1, 1/4]: the ratios are 1/2 and, since 2 is more than 1, 1. The prefix
    of both passes, so that no residual matters.
    """
    request = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    there = (request < requests)[:, None] & (lane < K)
    at = request[:, None] * K + lane
    limit = tl.load(limit_ptr + request, mask=request < requests, other=0)[:, None]
    place = tl.load(place_ptr + at, mask=there, other=size)
    coin = tl.load(coin_ptr + at, mask=there, other=0)
    coin_before = tl.load(coin_ptr + at - 1, mask=there & (lane > 0), other=0)
    p = tl.load(target_ptr + at, mask=there, other=0).to(tl.float64)
    q = tl.load(draft_ptr + at, mask=there, other=1).to(tl.float64)
    ratio = tl.full([ROWS], 1, tl.int64).to(tl.float64)
    ratios, before = tl.zeros_like(p), tl.zeros_like(p)
    for step in range(K):
        here = lane == step
        before = tl.where(here, ratio[:, None], before)
        joint = ratio * tl.sum(tl.where(here, p, 0), 1)
        ratio = tl.where(joint > 0, joint / tl.sum(tl.where(here, q, 0), 1), 0)
        ratio = tl.minimum(ratio, tl.full([ROWS], 1, tl.int64).to(tl.float64))
        ratios = tl.where(here, ratio[:, None], ratios)
    units = tl.full([], _ONE, tl.int64).to(tl.float64)
    joint = (ratios * units).to(tl.int64)
    before = (before * units).to(tl.int64)
    passes = tl.where(lane + 1 == limit, _at_end(coin, joint), joint == _ONE) & (lane < limit)
    surely = tl.max(tl.where(passes & there, lane + 1, 0), 1)[:, None]
    wanted = _at_end(coin_before, before + _ROUNDING) & (lane >= surely) & (lane < limit)
    tl.store(joint_ptr + at, joint, mask=there)
    tl.store(ratio_ptr + place, before, mask=place < size)
    tl.store(wanted_ptr + place, place, mask=wanted & (place < size))


@triton.jit
def _at_end(coin, joint):
    """Whether the prefix of all drafts passes: with its ratio's probability."""
    return _scaled(coin, tl.zeros_like(coin) + _ONE) < joint


@kernel
def _accept_kernel(
    target_ptr,  # [Q, K] int64
    draft_ptr,  # [Q, K] int64
    coin_ptr,  # [Q, K] int64
    joint_ptr,  # [Q, K] int64, or unused
    spare_ptr,  # [G, P, C] int64, likewise
    row_stride,
    segment_stride,
    limit_ptr,  # [Q] int64
    row_ptr,  # [Q, J] int64
    place_ptr,  # [Q, K] int64
    seed_ptr,  # [R] int64
    position_ptr,  # [R] int64
    greedy_ptr,  # [R] bool
    accepted_ptr,  # out: [Q] int64
    last_place_ptr,  # out: [Q] int64
    last_row_ptr,  # out: [Q] int64
    uniform_ptr,  # out: [Q] int64
    K,
    size,  # G
    parts,  # P * C
    PARTS: tl.constexpr,  # C
    ALL_PARTS: tl.constexpr,  # P * C, rounded up to a power of two
    LANES: tl.constexpr,  # K, rounded up to a power of two
):
    """What the coins of a request's drafts say.

    Example: p [1/2, 1/4], q [1/4, 1]: the first is accepted by every coin, the second by one in 4.
    """
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    there = lane < K
    at = request * K + lane
    first = tl.load(row_ptr + request * (K + 1))
    seed, start = tl.load(seed_ptr + first), tl.load(position_ptr + first)
    limit = tl.load(limit_ptr + request)
    zeros = tl.zeros([LANES], tl.int64)
    coin = tl.load(coin_ptr + at, mask=there, other=0)
    if joint_ptr is not None:
        joint = tl.load(joint_ptr + at, mask=there, other=0)
        following = there & (lane + 1 < K)
        place = tl.load(place_ptr + at + 1, mask=following, other=0)
        part = tl.arange(0, ALL_PARTS)[None, :]
        entry = (part // PARTS).to(tl.int64) * segment_stride + part % PARTS
        wanted = (following & (place < size))[:, None] & (part < parts)
        spare = spare_ptr + place[:, None] * row_stride + entry
        after = tl.sum(tl.load(spare, mask=wanted, other=0), 1)
        whole = after + (_ONE - joint)
        within = (_scaled(coin, whole) < after) | (whole == 0)
        passed = tl.where(lane + 1 == limit, _at_end(coin, joint), within)
        passed = passed & there & (lane + 1 <= limit)
        accepted = tl.max(tl.where(passed, lane + 1, 0), 0).to(tl.int64)
    else:
        p = tl.load(target_ptr + at, mask=there, other=0)
        q = tl.load(draft_ptr + at, mask=there, other=0)
        accepted = tl.minimum(_leading(_scaled(coin, q) < p, lane, K), limit)
    refused = accepted < limit
    place = tl.load(place_ptr + request * K + tl.minimum(accepted, K - 1))
    stream = tl.where(refused, _RECOVERY, _TARGET)
    uniform = counted(zeros + seed, zeros + start + accepted, zeros, zeros + stream)
    last = tl.load(row_ptr + request * (K + 1) + accepted)
    last = tl.where(tl.load(greedy_ptr + first) != 0, -1, last)
    tl.store(accepted_ptr + request, accepted)
    tl.store(last_place_ptr + request, tl.where(refused, place, -1))
    tl.store(last_row_ptr + request, last)
    tl.store(uniform_ptr + request, tl.max(uniform, 0))


@kernel
def _emit_kernel(
    argmax_ptr,  # [R] int64
    nans_ptr,  # [R] int64
    greedy_ptr,  # [R] bool
    row_ptr,  # [Q, J] int64
    count_ptr,  # [Q] int64
    draft_ptr,  # [Q, K] int64
    accepted_ptr,  # [Q] int64, or unused: all requests are greedy
    token_ptr,  # [Q] int64, likewise
    result_ptr,  # out: [Q, K + 5] int64
    K,
    LANES: tl.constexpr,  # J, rounded up to a power of two
):
    """The result of a request.

    Example: of drafts [5, 6] one is accepted, then comes 9: [5, 9, -1], 2 sampled, 1 rejected.
    """
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    rows = row_ptr + request * (K + 1)
    count = tl.load(count_ptr + request)
    own = (lane <= K) & (lane < count)
    row = tl.load(rows + lane, mask=own, other=0)
    draft = tl.load(draft_ptr + request * K + lane, mask=lane < K, other=-1)
    exact = own & (lane + 1 < count) & (draft >= 0)
    exact = exact & (tl.load(argmax_ptr + row, mask=own, other=-1) == draft)
    accepted = _leading(exact, lane, K)
    if accepted_ptr is not None:
        greedy = tl.load(greedy_ptr + tl.load(rows)) != 0
        accepted = tl.where(greedy, accepted, tl.load(accepted_ptr + request))
    likeliest = tl.load(argmax_ptr + tl.load(rows + accepted))
    token = likeliest
    if token_ptr is not None:
        greedy = tl.load(greedy_ptr + tl.load(rows)) != 0
        token = tl.where(greedy, likeliest, tl.load(token_ptr + request))
    tokens = tl.where(lane < accepted, draft, -1)
    tokens = tl.where(lane == accepted, token, tokens)
    nans = tl.sum(tl.load(nans_ptr + row, mask=own, other=0), 0)
    failed = (likeliest < 0).to(tl.int64)
    result = result_ptr + request * (K + 5)
    tl.store(result + lane, tokens, mask=lane <= K)
    tl.store(result + K + 1, accepted + 1 - failed)
    tl.store(result + K + 2, count - 1 - accepted)
    tl.store(result + K + 3, nans)
    tl.store(result + K + 4, failed)


@triton.jit
def _leading(passed, lane, K):
    """How many of K lanes pass before the first that does not."""
    return tl.minimum(tl.min(tl.where(passed, K, lane), 0), K).to(tl.int64)


@triton.jit
def _probability(weight, total):
    """Weight / total in units of 2**-60, at least 1 where there is a weight."""
    one = tl.full([], _ONE, tl.int64).to(tl.float64)
    factor = one / tl.maximum(total, 1).to(tl.float64)
    units = tl.minimum(weight.to(tl.float64) * factor, one).to(tl.int64)
    return tl.maximum(units, (weight > 0).to(tl.int64))


@triton.jit
def _scaled(uniform, total):
    """Uniform * total / 2**62, for numbers of at most 2**62."""
    doubled = (uniform << 1).to(tl.uint64, bitcast=True), (total << 1).to(tl.uint64, bitcast=True)
    return tl.umulhi(doubled[0], doubled[1]).to(tl.int64, bitcast=True)


def lay_out(
    begin_Q1: Tensor,
    request_R: Tensor,
    draft_row_R: Tensor,
    draft_steps_R: Tensor,
    one_hot_B: Tensor | None,
    draft_BK: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `ops.lay_out`."""
    Q, K, R = begin_Q1.shape[0] - 1, draft_BK.shape[1], request_R.shape[0]
    row_QJ, count_Q = draft_BK.new_empty((Q, K + 1)), draft_BK.new_empty(Q)
    token_QK, place_QK = (draft_BK.new_empty((Q, K)) for _ in range(2))
    drawn_Q = draft_BK.new_empty(Q, dtype=torch.bool)
    list_4G = draft_BK.new_full((4, size), -1)
    laid = (row_QJ, count_Q, token_QK, place_QK, drawn_Q, list_4G)
    if Q > 0:
        _lay_out_kernel[(Q,)](
            begin_Q1.contiguous(),
            request_R.contiguous(),
            draft_row_R.contiguous(),
            draft_steps_R.contiguous(),
            one_hot_B,
            draft_BK.contiguous(),
            *laid,
            R,
            K,
            size,
            LANES=triton.next_power_of_2(K + 1),
            num_warps=1,
        )
    return laid


def eligible(
    argmax_R: Tensor,
    greedy_R: Tensor,
    mass_RPC: Tensor,
    row_G: Tensor,
    token_G: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The kernel of `ops.eligible`."""
    judged_G, total_G = row_G.new_empty(row_G.shape), row_G.new_empty(row_G.shape)
    (size,), (P, C), places = row_G.shape, mass_RPC.shape[1:], 4
    if C > 0 and mass_RPC.stride(2) != 1:
        mass_RPC = mass_RPC.contiguous()
    if size > 0:
        _eligible_kernel[(triton.cdiv(size, places),)](
            argmax_R.contiguous(),
            greedy_R.contiguous(),
            mass_RPC,
            *mass_RPC.stride()[:2],
            row_G.contiguous(),
            token_G.contiguous(),
            judged_G,
            total_G,
            size,
            P * C,
            vocab_size,
            PARTS=max(C, 1),
            ALL_PARTS=triton.next_power_of_2(max(P * C, 1)),
            ROWS=places,
            num_warps=1,
        )
    return judged_G, total_G


def chances(
    row_G: Tensor,
    weight_G: Tensor,
    total_G: Tensor,
    draft_weight_G: Tensor | None,
    draft_total_G: Tensor | None,
    drawn_Q: Tensor,
    row_QJ: Tensor,
    place_QK: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `ops.chances`."""
    Q, K = place_QK.shape
    target_QK, draft_QK, coin_QK = (place_QK.new_empty((Q, K)) for _ in range(3))
    limit_Q = place_QK.new_empty(Q)
    if Q > 0:
        _chances_kernel[(Q,)](
            row_G.contiguous(),
            weight_G.contiguous(),
            total_G.contiguous(),
            None if draft_weight_G is None else draft_weight_G.contiguous(),
            None if draft_total_G is None else draft_total_G.contiguous(),
            drawn_Q.contiguous(),
            row_QJ.contiguous(),
            place_QK.contiguous(),
            seed_R.contiguous(),
            position_R.contiguous(),
            target_QK,
            draft_QK,
            coin_QK,
            limit_Q,
            K,
            row_G.shape[0],
            LANES=triton.next_power_of_2(K),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return target_QK, draft_QK, coin_QK, limit_Q


def prefixes(
    target_QK: Tensor,
    draft_QK: Tensor,
    coin_QK: Tensor,
    limit_Q: Tensor,
    place_QK: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of `ops.prefixes`."""
    joint_QK = torch.empty_like(target_QK, memory_format=torch.contiguous_format)
    ratio_G, wanted_G = target_QK.new_full((size,), ONE), target_QK.new_full((size,), -1)
    (Q, K), rows = target_QK.shape, 8
    if Q > 0:
        _prefixes_kernel[(triton.cdiv(Q, rows),)](
            target_QK.contiguous(),
            draft_QK.contiguous(),
            coin_QK.contiguous(),
            limit_Q.contiguous(),
            place_QK.contiguous(),
            joint_QK,
            ratio_G,
            wanted_G,
            Q,
            K,
            size,
            ROWS=rows,
            LANES=triton.next_power_of_2(K),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return joint_QK, ratio_G, wanted_G


def accept(
    target_QK: Tensor,
    draft_QK: Tensor,
    coin_QK: Tensor,
    joint_QK: Tensor | None,
    spare_GPC: Tensor | None,
    limit_Q: Tensor,
    row_QJ: Tensor,
    place_QK: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    greedy_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `ops.accept`."""
    Q, K = place_QK.shape
    G, P, C = (1, 1, 1) if spare_GPC is None else spare_GPC.shape
    if spare_GPC is not None and spare_GPC.stride(2) != 1:
        spare_GPC = spare_GPC.contiguous()
    accepted_Q, place_Q, end_Q, uniform_Q = (limit_Q.new_empty(Q) for _ in range(4))
    if Q > 0:
        _accept_kernel[(Q,)](
            target_QK.contiguous(),
            draft_QK.contiguous(),
            coin_QK.contiguous(),
            None if joint_QK is None else joint_QK.contiguous(),
            spare_GPC,
            *((0, 0) if spare_GPC is None else spare_GPC.stride()[:2]),
            limit_Q.contiguous(),
            row_QJ.contiguous(),
            place_QK.contiguous(),
            seed_R.contiguous(),
            position_R.contiguous(),
            greedy_R.contiguous(),
            accepted_Q,
            place_Q,
            end_Q,
            uniform_Q,
            K,
            G,
            P * C,
            PARTS=C,
            ALL_PARTS=triton.next_power_of_2(P * C),
            LANES=triton.next_power_of_2(K),
            num_warps=1,
        )
    return accepted_Q, place_Q, end_Q, uniform_Q


def emit(
    argmax_R: Tensor,
    nans_R: Tensor,
    greedy_R: Tensor,
    row_QJ: Tensor,
    count_Q: Tensor,
    token_QK: Tensor,
    accepted_Q: Tensor | None,
    token_Q: Tensor | None,
) -> Tensor:
    """The kernel of `ops.emit`."""
    Q, K = token_QK.shape
    result_QW = token_QK.new_empty((Q, K + 5))
    if Q > 0:
        _emit_kernel[(Q,)](
            argmax_R.contiguous(),
            nans_R.contiguous(),
            greedy_R.contiguous(),
            row_QJ.contiguous(),
            count_Q.contiguous(),
            token_QK.contiguous(),
            None if accepted_Q is None else accepted_Q.contiguous(),
            None if token_Q is None else token_Q.contiguous(),
            result_QW,
            K,
            LANES=triton.next_power_of_2(K + 1),
            num_warps=1,
        )
    return result_QW

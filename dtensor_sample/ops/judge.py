"""Judging drafts: small integer work on a grid of requests and their drafts, in a few ops.

Q requests have up to K drafts each, in J = K + 1 rows of target logits: draft j of a request is
judged by its row j. The G drafts that exist are listed, without the places of the grid that no
draft takes: what is read or written by vocabulary has one row a listed draft. Probabilities are
integers in units of 2**-60, coins uniform integers of 62 bits.

These take plain tensors only: a place in the grid is no row that a mesh could shard.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_sample.ops.define import define
from dtensor_sample.ops.residual import ONE, probability
from dtensor_sample.ops.uniform import uniform
from dtensor_sample.random import COIN, RECOVERY, TARGET, scaled

ROUNDING = 1 << 20
"""By so much rounding may lift a residual above its ratio, and more; units of 2**-60."""


@define("lay_out")
def lay_out(
    begin_Q1: Tensor,
    request_R: Tensor,
    draft_row_R: Tensor,
    draft_steps_R: Tensor,
    one_hot_B: Tensor | None,
    draft_BK: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Lay out the drafts of Q requests.

    Args:
        begin_Q1: [Q + 1] int64, the first of each request's rows, and their end.
        request_R: [R] int64, which of B requests each row belongs to.
        draft_row_R: [R] int64, where the first draft logits of its request are kept; < 0: nowhere.
        draft_steps_R: [R] int64, of how many drafts they are kept.
        one_hot_B: [B] bool, requests whose draft logits are not to be read; None: none.
        draft_BK: [B, K] int64 draft tokens.
        size: G, at least as many as there are drafts.

    Returns:
        row_QJ [Q, J] int64, the row of each place in a request; count_Q [Q] int64, its rows, 0 for
        padding; token_QK [Q, K] int64; place_QK [Q, K] int64, where each draft is listed, G if
        there is no such draft; drawn_Q [Q] bool, whether its drafts have logits; and lists, [4, G]
        int64, -1 for padding: the row that judges each; its token; the same unless its request's
        drafts have logits, else -1; and where its draft logits lie, -1 for nowhere.
    """
    begin_Q, count_Q = begin_Q1[:-1], begin_Q1.diff()
    Q, K, device = len(begin_Q), draft_BK.shape[1], begin_Q1.device
    step_J = torch.arange(K + 1, device=device)
    row_QJ = (begin_Q[:, None] + step_J).clamp(max=len(request_R) - 1)
    first_Q, exists_QK = row_QJ[:, 0], step_J[1:] < count_Q[:, None]
    request_Q, steps_Q = request_R[first_Q], draft_steps_R[first_Q]
    place_QK = (begin_Q - torch.arange(Q, device=device))[:, None] + step_J[:-1]
    place_QK = torch.where(exists_QK, place_QK, size)
    if one_hot_B is not None:
        steps_Q = steps_Q.masked_fill(one_hot_B[request_Q], 0)
    kept_QK = draft_row_R[first_Q][:, None] + step_J[:-1]
    kept_QK = torch.where(step_J[:-1] < steps_Q[:, None], kept_QK, -1)
    token_QK = draft_BK[request_Q]
    drawn_Q = steps_Q > 0
    one_hot_QK = torch.where(drawn_Q[:, None], -1, token_QK)
    grids = (row_QJ[:, :-1], token_QK, one_hot_QK, kept_QK)
    list_4G = torch.stack([listed(x_QK, place_QK, size) for x_QK in grids])
    return row_QJ, count_Q, token_QK, place_QK, drawn_Q, list_4G


@lay_out.register_fake
def _(
    begin_Q1: Tensor,
    request_R: Tensor,
    draft_row_R: Tensor,
    draft_steps_R: Tensor,
    one_hot_B: Tensor | None,
    draft_BK: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    Q, K = begin_Q1.shape[0] - 1, draft_BK.shape[1]
    row_QJ, count_Q = draft_BK.new_empty((Q, K + 1)), draft_BK.new_empty(Q)
    token_QK, place_QK = draft_BK.new_empty((Q, K)), draft_BK.new_empty((Q, K))
    drawn_Q = draft_BK.new_empty(Q, dtype=torch.bool)
    return row_QJ, count_Q, token_QK, place_QK, drawn_Q, draft_BK.new_empty((4, size))


@define("eligible")
def eligible(
    argmax_R: Tensor,
    greedy_R: Tensor,
    mass_RPC: Tensor,
    row_G: Tensor,
    token_G: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Which drafts can be judged by coins: tokens, in rows that have one and are not greedy.

    Args:
        argmax_R: [R] int64, the likeliest token of each row, -1 where it has none.
        greedy_R: [R] bool.
        mass_RPC: [R, P, PARTS] int64, see `Weighed`.
        row_G, token_G: of the lists of `lay_out`.
        vocab_size: V.

    Returns:
        [G] int64, the row of each that can be, else -1; and [G] int64, the mass of the row that
        `row_G` names, whether its draft can be judged or not, 0 for padding.
    """
    at_G, known_G = row_G.clamp(min=0), (token_G >= 0) & (token_G < vocab_size)
    known_G &= (row_G >= 0) & (argmax_R[at_G] >= 0) & ~greedy_R[at_G]
    total_G = mass_RPC[at_G].sum((1, 2)) * (row_G >= 0)
    return torch.where(known_G, row_G, -1), total_G


@eligible.register_fake
def _(
    argmax_R: Tensor,
    greedy_R: Tensor,
    mass_RPC: Tensor,
    row_G: Tensor,
    token_G: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    return row_G.new_empty(row_G.shape), row_G.new_empty(row_G.shape)


@define("chances")
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
    """How likely each drafted token is, and a coin for it.

    Args:
        row_G, total_G: see `eligible`.
        weight_G: [G] int64, the weights of listed drafts under the target.
        draft_weight_G, draft_total_G: [G] int64, those under the draft, and of all its tokens;
            None: all drafts are one-hot.
        drawn_Q, row_QJ, place_QK: see `lay_out`.
        seed_R: [R] int64.
        position_R: [R] int64, of the token that each row emits.

    Returns:
        [Q, K] int64 probabilities under the target, 0 where there is no draft, and under the draft,
        1 where it is one-hot; [Q, K] int64 coins in [0, 2**62); and [Q] int64, how many drafts can
        be accepted: those before the first that cannot be judged, or whose draft logits have no
        token.
    """
    target_QK = gridded(probability(weight_G, total_G), place_QK)
    draft_QK = torch.full_like(target_QK, ONE)
    usable_QK = gridded(row_G + 1, place_QK) > 0
    if draft_weight_G is not None and draft_total_G is not None:
        drawn_QK = drawn_Q[:, None].expand_as(place_QK)
        drawn_from_QK = gridded(probability(draft_weight_G, draft_total_G), place_QK)
        draft_QK = torch.where(drawn_QK, drawn_from_QK, draft_QK)
        usable_QK &= ~drawn_QK | (gridded(draft_total_G, place_QK) > 0)
    step_QK = torch.arange(place_QK.shape[1], device=row_QJ.device).expand_as(place_QK)
    counters = (x_R[row_QJ[:, :1]].expand_as(place_QK) for x_R in (seed_R, position_R))
    coin_QK = uniform(*(x_QK.flatten() for x_QK in (*counters, step_QK)), COIN)
    return target_QK, draft_QK, coin_QK.view(place_QK.shape), leading(usable_QK)


@chances.register_fake
def _(
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
    target_QK, draft_QK, coin_QK = (torch.empty_like(place_QK) for _ in range(3))
    return target_QK, draft_QK, coin_QK, place_QK.new_empty(place_QK.shape[0])


@define("prefixes")
def prefixes(
    target_QK: Tensor,
    draft_QK: Tensor,
    coin_QK: Tensor,
    limit_Q: Tensor,
    place_QK: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Joint ratios of block verification: r_i = min(r_{i-1} * p_i / q_i, 1), r_0 = 1.

    And the few places whose residuals matter. Those before the longest prefix that passes whatever
    its residual, since its ratio is 1 or since its end decides, do not; neither do those whose
    coins lie above their ratio, the most that a residual can be.

    Args:
        target_QK, draft_QK, coin_QK, limit_Q: see `chances`.
        place_QK, size: see `lay_out`.

    Returns:
        [Q, K] int64, r_1 to r_K in units of 2**-60; q = 0 gives 1 where p > 0, and 0 where p = 0.
        Listed, [G] int64, the ratio of the drafts before each: r_0 to r_{K-1}, 1 for padding; and
        [G] int64, each place whose residual matters, else -1.
    """
    ratio_Q = torch.ones_like(target_QK[:, 0], dtype=torch.float64)
    ratios = []
    for target_Q, draft_Q in zip(target_QK.unbind(1), draft_QK.unbind(1), strict=True):
        joint_Q = ratio_Q * target_Q.double()
        ratio_Q = torch.where(joint_Q > 0, joint_Q / draft_Q.double(), 0.0).clamp(max=1.0)
        ratios.append((ratio_Q * float(ONE)).to(torch.int64))
    joint_QK = torch.stack(ratios, 1)
    length_K = torch.arange(1, joint_QK.shape[1] + 1, device=joint_QK.device)
    passes_QK = torch.where(
        length_K == limit_Q[:, None], _at_end(coin_QK, joint_QK), joint_QK == ONE
    )
    surely_Q = (length_K * (passes_QK & (length_K <= limit_Q[:, None]))).amax(1)
    before_QK = pad(joint_QK[:, :-1], (1, 0), value=ONE)
    may_QK = _at_end(pad(coin_QK[:, :-1], (1, 0)), before_QK + ROUNDING)
    step_K = length_K - 1
    wanted_QK = may_QK & (step_K >= surely_Q[:, None]) & (step_K < limit_Q[:, None])
    wanted_G = listed(torch.where(wanted_QK, place_QK, -1), place_QK, size)
    return joint_QK, listed(before_QK, place_QK, size, ONE), wanted_G


@prefixes.register_fake
def _(
    target_QK: Tensor,
    draft_QK: Tensor,
    coin_QK: Tensor,
    limit_Q: Tensor,
    place_QK: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    ratio_G, wanted_G = target_QK.new_empty(size), target_QK.new_empty(size)
    return torch.empty_like(target_QK), ratio_G, wanted_G


@define("accept")
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
    """Accept drafts by their coins, and make the number that draws the token after them.

    Args:
        target_QK, draft_QK, coin_QK, limit_Q, seed_R, position_R: see `chances`.
        joint_QK: joint ratios for block verification, see `prefixes`; None: each draft is accepted
            with probability min(1, p / q), up to the first that is not.
        spare_GPC: with them, [G, P, PARTS] int64, the residual of each listed draft, or 0 where it
            does not matter.
        row_QJ, place_QK: see `lay_out`.
        greedy_R: [R] bool.

    Returns:
        [Q] int64, how many are accepted; the place in the list of a draft that could be and was
        refused after them, -1 for none; the row of the token after them, -1 if that is greedy; and
        a uniform number for that token.
    """
    K, first_Q = place_QK.shape[1], row_QJ[:, 0]
    seed_Q, start_Q = seed_R[first_Q], position_R[first_Q]
    if joint_QK is not None and spare_GPC is not None:
        spare_QK = gridded(spare_GPC.sum((1, 2)), place_QK)
        accepted_Q = _longest_prefix(joint_QK, spare_QK, coin_QK, limit_Q)
    else:
        passed_QK = scaled(coin_QK, draft_QK) < target_QK
        accepted_Q = torch.minimum(leading(passed_QK), limit_Q)
    refused_Q = accepted_Q < limit_Q
    end_Q = row_QJ.gather(1, accepted_Q[:, None])[:, 0].masked_fill(greedy_R[first_Q], -1)
    place_Q = place_QK.gather(1, accepted_Q[:, None].clamp(max=K - 1))[:, 0]
    place_Q = torch.where(refused_Q, place_Q, -1)
    counter = (seed_Q, start_Q + accepted_Q, torch.zeros_like(start_Q))
    uniform_Q = torch.where(refused_Q, uniform(*counter, RECOVERY), uniform(*counter, TARGET))
    return accepted_Q, place_Q, end_Q, uniform_Q


@accept.register_fake
def _(
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
    accepted_Q, place_Q, end_Q, uniform_Q = (torch.empty_like(limit_Q) for _ in range(4))
    return accepted_Q, place_Q, end_Q, uniform_Q


@define("emit")
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
    """What each request reports: its accepted drafts and the token after them.

    Greedy requests accept what they would have taken themselves, without coins.

    Args:
        argmax_R, nans_R: [R] int64, see `Weighed`.
        greedy_R: [R] bool.
        row_QJ, count_Q, token_QK: see `lay_out`.
        accepted_Q: [Q] int64, how many are accepted, if the request is not greedy; None: all
            requests are.
        token_Q: [Q] int64, the token after them, -1 if it is not here; likewise.

    Returns:
        [Q, K + 5] int64: J tokens or -1, then how many are emitted and rejected, NaN logits of the
        request's rows, and 1 if no token was left.
    """
    argmax_QJ, greedy_Q = argmax_R[row_QJ], greedy_R[row_QJ[:, 0]]
    step_J = torch.arange(row_QJ.shape[1], device=row_QJ.device)
    exact_QK = (token_QK >= 0) & (token_QK == argmax_QJ[:, :-1])
    exact_Q = leading(exact_QK & (step_J[1:] < count_Q[:, None]))
    accepted_Q = exact_Q if accepted_Q is None else torch.where(greedy_Q, exact_Q, accepted_Q)
    likeliest_Q = argmax_QJ.gather(1, accepted_Q[:, None])[:, 0]
    token_Q = likeliest_Q if token_Q is None else torch.where(greedy_Q, likeliest_Q, token_Q)
    tokens_QJ = torch.where(step_J < accepted_Q[:, None], pad(token_QK, (0, 1), value=-1), -1)
    tokens_QJ = torch.where(step_J == accepted_Q[:, None], token_Q[:, None], tokens_QJ)
    nans_Q = (nans_R[row_QJ] * (step_J < count_Q[:, None])).sum(1)
    failed_Q = (likeliest_Q < 0).to(torch.int64)
    counts = (accepted_Q + 1 - failed_Q, count_Q - 1 - accepted_Q, nans_Q, failed_Q)
    return torch.cat([tokens_QJ, torch.stack(counts, 1)], 1)


@emit.register_fake
def _(
    argmax_R: Tensor,
    nans_R: Tensor,
    greedy_R: Tensor,
    row_QJ: Tensor,
    count_Q: Tensor,
    token_QK: Tensor,
    accepted_Q: Tensor | None,
    token_Q: Tensor | None,
) -> Tensor:
    Q, J = row_QJ.shape
    return row_QJ.new_empty((Q, J + 4))


def listed(x_QK: Tensor, place_QK: Tensor, size: int, padding: int = -1) -> Tensor:
    """Entries of a grid -> [G] those of the drafts."""
    listed_G = x_QK.new_full((size + 1,), padding)
    return listed_G.scatter(0, place_QK.flatten(), x_QK.flatten())[:-1]


def gridded(x_G: Tensor, place_QK: Tensor) -> Tensor:
    """The inverse of `listed`: [Q, K], 0 where there is no draft."""
    return pad(x_G, (0, 1))[place_QK]


def leading(passed_QK: Tensor) -> Tensor:
    """[Q] int64: how many entries pass before the first that does not."""
    return passed_QK.to(torch.int64).cumprod(1).sum(1)


def _at_end(coin_QK: Tensor, joint_QK: Tensor) -> Tensor:
    """Whether the prefix of all drafts passes: with its ratio's probability."""
    return scaled(coin_QK, torch.full_like(joint_QK, ONE)) < joint_QK


def _longest_prefix(joint_QK: Tensor, spare_QK: Tensor, coin_QK: Tensor, limit_Q: Tensor) -> Tensor:
    """[Q] int64: the length of the longest prefix that passes in block verification.

    The prefix of the first i drafts passes with probability s / (s + 1 - r) for its joint ratio r
    and the residual mass s of the place after it, and with r where there is no such place.

    Args:
        joint_QK: [Q, K] int64, joint ratios of the prefixes, in units of 2**-60.
        spare_QK: [Q, K] int64, residual masses of all places that matter, in the same units.
        coin_QK: [Q, K] int64 in [0, 2**62).
        limit_Q: [Q] int64, the longest prefix that may pass.
    """
    length_K = torch.arange(1, joint_QK.shape[1] + 1, device=joint_QK.device)
    after_QK = pad(spare_QK[:, 1:], (0, 1))
    whole_QK = after_QK + (ONE - joint_QK)
    within_QK = (scaled(coin_QK, whole_QK) < after_QK) | (whole_QK == 0)
    at_end_QK = _at_end(coin_QK, joint_QK)
    passed_QK = torch.where(length_K == limit_Q[:, None], at_end_QK, within_QK)
    passed_QK &= length_K <= limit_Q[:, None]
    return (passed_QK * length_K).amax(1)

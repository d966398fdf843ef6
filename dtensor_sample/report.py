"""What is told of emitted tokens: log-probabilities, ranks, likeliest, given and kept tokens.

Told after the tokens are known, from the rows that decided about them, by the request's owner or,
where the vocabulary is sharded, by sums over all ranks. All of a token's numbers are packed into
one row of 32-bit integers, floats by their bits, so that one more collective brings them to every
rank. Which there are follows from what the requests of the batch asked for, which is host data:
replicated, as are the shapes that follow from it.
"""

import math
import struct
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_sample import ops
from dtensor_sample.logprobs import weigh_raw
from dtensor_sample.ops.logarithm import LN_2
from dtensor_sample.ops.values import weight_bits
from dtensor_sample.output import SamplerOutput, TokenLogprobs
from dtensor_sample.params import Wants
from dtensor_sample.plan import ShardPlan
from dtensor_sample.weigh import Weighed

_NOTHING = struct.unpack("i", struct.pack("f", -math.inf))[0]
"""The bits of -inf."""


def report(output: SamplerOutput, row: Weighed, plan: ShardPlan) -> SamplerOutput:
    """The output of a step, with what its requests asked to be told.

    Args:
        output: of the step, settled.
        row: what its tokens were drawn from, the plan's local rows.
        plan: the step's.
    """
    wants = plan.wants
    if not wants.logprobs:
        return output
    begin_Q, count_Q = plan.local_cu_num_logits[:-1], plan.local_cu_num_logits.diff()
    step_J = torch.arange(plan.told_rows, device=begin_Q.device)
    row_QJ = (begin_Q[:, None] + step_J).clamp(max=plan.row_requests.shape[0] - 1)
    request_Q = plan.row_requests[row_QJ[:, 0]]
    asked_QW = _asked(plan)[request_Q]
    token_QJ = output.token_ids[request_Q, : len(step_J)]
    # Requests that are padding tell nothing; their rows need not be read.
    told_QJ = (token_QJ >= 0) & (step_J < count_Q[:, None]) & (asked_QW[:, :1] > 0)
    given_QG = asked_QW[:, len(Wants._fields) :]
    ids_QJI = torch.cat([token_QJ[..., None], given_QG[:, None].expand(-1, len(step_J), -1)], 2)

    index_N, told_N = row_QJ.flatten(), told_QJ.flatten()
    columns = _describe(
        row.at(index_N, told_N),
        told_N,
        told_N & plan.row_params()[0].greedy[index_N],
        torch.where(told_N[:, None], ids_QJI.flatten(0, 1), -1),
        plan,
    )
    bits = [x.view(torch.int32) if x.is_floating_point() else x.to(torch.int32) for x in columns]
    packed_NW = torch.cat(bits, 1)
    columns_of_all = len(step_J) * packed_NW.shape[1]
    settled = plan.settle(packed_NW.view(len(begin_Q), columns_of_all))
    packed_BJW = settled.view(len(settled), len(step_J), packed_NW.shape[1])
    return replace(output, logprobs=_unpacked(packed_BJW, plan))


def _asked(plan: ShardPlan) -> Tensor:
    """[B, W] what each request wants told, and its given ids."""
    return plan.asked.view(len(plan.batch_slots), len(Wants._fields) + plan.wants.given)


def _describe(
    drawn: Weighed, told_N: Tensor, greedy_N: Tensor, ids_NI: Tensor, plan: ShardPlan
) -> list[Tensor]:
    """All about N tokens: integers below 2**31, or float32, in the columns of `_unpacked`.

    Args:
        drawn: what each token was drawn from; rows without tokens where nothing is told.
        told_N: where something is.
        greedy_N: whether the token was not drawn, but is the largest.
        ids_NI: the token itself, and given ids; -1 where nothing is told.
        plan: the step's.
    """
    wants, where, V = plan.wants, plan.exchange, plan.state.vocab_size
    mode = plan.state.logprobs_mode
    total_N = torch.where(greedy_N, 1 << weight_bits(V), drawn.total_R)
    share = (drawn.peak_R, drawn.scale_R, torch.where(told_N, total_N, 0))
    seen, seen_share, certain_N = drawn, share, greedy_N
    if mode.startswith("raw"):
        seen = weigh_raw(drawn.logits, where, V)
        seen_share = (seen.peak_R, seen.scale_R, seen.total_R)
        certain_N = torch.zeros_like(greedy_N)

    # What lies in one part of the vocabulary each, then what all parts come to.
    value_NI = seen.read(ids_NI, where, V)
    counts = [ops.tally(*seen.args, value_NI[:, 0].contiguous(), V, wants.entropy)]
    tops = []
    if wants.top:
        tops.append(ops.top(*seen.logits, V, wants.top))
    if wants.kept:
        counts.append(ops.tally(*drawn.args, drawn.peak_R, V, False))
        tops.append(ops.top(*drawn.logits, V, wants.kept))
    counts_N = where.total(torch.cat(counts, 1)).unbind(1)
    larger_N, spread_N, num_kept_N = counts_N[0], counts_N[2], counts_N[-2]
    if tops:
        tops = list(where.segments(torch.cat(tops, 2)).split([top.shape[2] for top in tops], 2))
    none_N1 = ids_NI.new_full((len(ids_NI), 1, 0), -1)

    def kept(value_NX: Tensor, id_NX: Tensor) -> Tensor:
        """Values of what the token could have been, -inf of all else."""
        own_NX = id_NX == drawn.argmax_R[:, None]
        kept_NX = torch.where(greedy_N[:, None], own_NX, value_NX >= drawn.floor_R[:, None])
        return torch.where(kept_NX, value_NX, -torch.inf)

    def possible(value_NX: Tensor, id_NX: Tensor) -> Tensor:
        """Values of what the state's mode tells of, -inf of all else."""
        return value_NX if mode.startswith("raw") else kept(value_NX, id_NX)

    def shown(value_NX: Tensor) -> Tensor:
        """Possible values in the state's mode."""
        if mode == "raw_logits":
            return value_NX
        if mode == "processed_logits":
            return _scaled(value_NX, drawn.scale_R)
        found_NX: Tensor = ops.log_probability(value_NX, *seen_share, V)
        return found_NX

    def best(packed_NPX: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return ops.unpack_top(packed_NPX.flatten(1).topk(count).values)

    def listed(value_NX: Tensor, id_NX: Tensor) -> Tensor:
        """Ids of possible values, though their log-probability may be -inf in float32."""
        return torch.where(value_NX > -torch.inf, id_NX, -1)

    top_NT, top_id_NT = best(tops[0] if wants.top else none_N1, wants.top)
    top_NT = possible(top_NT, top_id_NT)
    kept_NC, kept_id_NC = best(tops[-1] if wants.kept else none_N1, wants.kept)
    kept_NC = kept(kept_NC, kept_id_NC)
    entropy_N = ops.entropy(seen_share[2], torch.where(certain_N, 0, spread_N), V)
    return [
        shown(possible(value_NI, ids_NI)),
        torch.where(told_N, 1 + larger_N, 0)[:, None],
        listed(top_NT, top_id_NT),
        shown(top_NT),
        torch.where(greedy_N, 1, num_kept_N)[:, None],
        listed(kept_NC, kept_id_NC),
        ops.log_probability(kept_NC, *share, V),
        entropy_N[:, None],
    ]


def _scaled(value_NX: Tensor, scale_N: Tensor) -> Tensor:
    """Values divided by the temperature: finite, but for what is not kept."""
    largest = torch.finfo(torch.float32).max
    found_NX = (value_NX.double() * (scale_N.double() * LN_2)[:, None]).clamp(-largest, largest)
    return torch.where(value_NX > -torch.inf, found_NX.float(), -torch.inf)


def _unpacked(packed_BJW: Tensor, plan: ShardPlan) -> TokenLogprobs:
    """Packed columns, without what a request did not ask for, and with room for all K + 1 tokens.

    Columns are all values of `TokenLogprobs` but one, which follows from others.
    """
    wants, (_, top_B, _, capacity_B, entropy_B) = (
        plan.wants,
        _asked(plan)[:, : len(Wants._fields)].unbind(1),
    )
    widths = (1, wants.given, 1, wants.top, wants.top, 1, wants.kept, wants.kept, 1)
    token, given, rank, top_ids, top, num_kept, kept_ids, kept, entropy = packed_BJW.split(
        widths, 2
    )
    missing = plan.state.num_speculative_tokens + 1 - packed_BJW.shape[1]

    def numbers(x_BJX: Tensor, most_B: Tensor, nothing: int) -> Tensor:
        place_X = torch.arange(x_BJX.shape[2], device=x_BJX.device)
        x_BJX = torch.where((place_X < most_B[:, None])[:, None], x_BJX, nothing)
        return pad(x_BJX, (0, 0, 0, missing), value=nothing).to(torch.int64)

    def floats(x_BJX: Tensor, most_B: Tensor) -> Tensor:
        return numbers(x_BJX, most_B, _NOTHING).to(torch.int32).view(torch.float32)

    all_B = torch.full_like(top_B, wants.given + 1)
    num_kept_BJ = numbers(num_kept, capacity_B, 0)[..., 0]
    return TokenLogprobs(
        token_logprobs=floats(token, all_B)[..., 0],
        ranks=numbers(rank, all_B, 0)[..., 0],
        top_ids=numbers(top_ids, top_B, -1),
        top_logprobs=floats(top, top_B),
        given_logprobs=floats(given, all_B),
        num_kept=num_kept_BJ,
        kept_ids=numbers(kept_ids, capacity_B, -1),
        kept_logprobs=floats(kept, capacity_B),
        kept_overflow=num_kept_BJ > capacity_B[:, None],
        entropy=floats(entropy, entropy_B)[..., 0],
    )

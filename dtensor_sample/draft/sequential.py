"""Semi-autoregressive drafting: a block of base logits at once, then its tokens left to right.

A drafter gives base logits for K positions in one pass; each position then adds a bias that depends
on the token really drawn before it, a low-rank table of V x V numbers (the Markov head of DSpark,
arXiv 2607.05147). Every step of that loop works on whole rows, so it is sharded as sampling is:

    base logits [num_rows, K, V] -> where the exchange puts them      (`batch`: one all-to-all)
    K times: add the bias -> keep the row -> draw -> the token before the next one
    tokens and confidences -> every rank, in batch order              (`batch`: one all-gather)

Under `batch` a rank loops over the requests that it owns, ceil(B / P) of them, and keeps their rows
where it will verify them. Under `vocab` all ranks loop over all requests, each on its columns, and
exchange a few integers a step. Plans have one row a request, so a graph of a capacity is as wide as
its requests are many.

The tokens are those that a `DraftSampler` would draw from the same rows: the same random numbers,
and q is what was stored.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dtensor_sample import check, ops
from dtensor_sample.exchange import Axis, Exchange, Logits, exchange_of
from dtensor_sample.layout import DTYPES
from dtensor_sample.log import say
from dtensor_sample.ops.largest import TOP_P_ONE
from dtensor_sample.ops.markov import MOST_FACTORS
from dtensor_sample.params import CANDIDATES, Filters, RowParams
from dtensor_sample.plan import ShardPlan, check_plan, forget_drafts
from dtensor_sample.process import process
from dtensor_sample.random import DRAFT
from dtensor_sample.sampler import draw
from dtensor_sample.state import SamplingState
from dtensor_sample.weigh import weigh

LOOPS = ("auto", "sharded", "replicated")
_FEWEST_FACTORS = 32
_WIDEST = (1 << 15) - 1


class DraftOutput(NamedTuple):
    """Drafts of B requests in batch order: plain tensors, the same on every rank."""

    token_ids: Tensor
    """[B, K] int64; -1 from the first position on at which no token was left."""
    confidences: Tensor | None
    """[B, K] float32 in [0, 1]: how likely each draft is to be accepted if those before it are,
    known before it was drawn; 0 where there is no draft before. None: the head tells none."""


class MarkovHead:
    """What each token adds to the base logits after it: `w1[token] @ w2`, a vector of D numbers.

    Factors are kept as integers of eight bits with a scale for each row of w1 and each column of
    w2: a quarter of the memory of float32, and products that are the same bits however the
    vocabulary is sharded. An error of 1% of the bias is less than what bfloat16 logits lose.

    Args:
        w1: [V, r] floating point, plain, the same on every rank; V is the target's vocabulary, and
            r in [1, 1024].
        w2: [r, D] on the same device, D the draft's vocabulary. Plain, the same on every rank; or a
            DTensor Shard(1) over the sampling axis as draft logits are, padding included, which
            serves "vocab" only and takes 1/P of the memory.
        confidence: [H + r] floating point, plain: how likely position k is to be accepted is
            `sigmoid(confidence . [hidden of k; w1[token before]] + confidence_bias)`. None: that
            is not told.
        confidence_bias: finite.

    Raises:
        ValueError: names the argument.

    Example:
        >>> head = MarkovHead(torch.randn(9, 2), torch.randn(2, 9))
        >>> head.vocab_size, head.draft_vocab_size
        (9, 9)
    """

    def __init__(
        self,
        w1: Tensor,
        w2: Tensor,
        *,
        confidence: Tensor | None = None,
        confidence_bias: float = 0.0,
    ) -> None:
        self.vocab_size, rank = _shape("w1", w1, 2)
        check.integer("w1.shape[1]", rank, 1, MOST_FACTORS)
        self.sharded = isinstance(w2, DTensor)
        if isinstance(w2, DTensor):
            if w2.device_mesh.ndim != 1 or w2.placements != (Shard(1),) or w2.ndim != 2:
                raise ValueError(
                    "w2 must be a plain tensor or a DTensor [r, D] Shard(1) on a mesh of one "
                    f"dimension, got {list(w2.shape)}, {w2.placements} on {w2.device_mesh}"
                )
            local_rD = w2.to_local()
        else:
            _shape("w2", w2, 2)
            local_rD = w2
        if w2.shape[0] != rank or local_rD.device != w1.device:
            raise ValueError(
                f"w2 must have {rank} rows, as w1 has columns, on {w1.device}, got "
                f"{list(w2.shape)} on {local_rD.device}"
            )
        self.draft_vocab_size = w2.shape[1]
        self.left = _factors(w1)
        self.right = _factors(local_rD.T)
        self.weight_H: Tensor | None = None
        """[H] float32: of the hidden state in the confidence."""
        self.offset_V = torch.zeros(0, dtype=torch.int64, device=w1.device)
        """[V] int64: the rest of it by the token before, see `ops.confidence`."""
        bias = check.real("confidence_bias", confidence_bias, -float(_WIDEST), float(_WIDEST))
        if confidence is not None:
            (width,) = _shape("confidence", confidence, 1)
            check.integer("len(confidence)", width, rank + 1, rank + _WIDEST)
            weight = confidence.detach().to(w1.device, torch.float32)
            self.weight_H = weight[:-rank].contiguous()
            product_Vr = w1.detach().to(torch.float64) * weight[-rank:].to(torch.float64)
            rest = torch.tensor(bias, dtype=torch.float64, device=w1.device)
            self.offset_V = ops.units(product_Vr).sum(1) + ops.units(rest)

    def columns(self, axis: Axis, width: int) -> tuple[Tensor, Tensor]:
        """Factors and scales of this rank's columns, if every shard of the vocabulary has so many.

        Args:
            axis: that shards the vocabulary.
            width: columns of every shard but shorter last ones.
        """
        if self.sharded:
            return self.right
        factor_DF, scale_D = self.right
        mine = slice(axis.rank * width, (axis.rank + 1) * width)
        return factor_DF[mine], scale_D[mine]


class SequentialDraftSampler:
    """Draws the K draft tokens of each request from base logits of a block, left to right.

    A request's own temperature, filters and other wishes shape each step's distribution q, and so
    do the drafts before it. Rows that were drawn from go to the cache that the state owns; greedy
    requests need none.

    Args:
        state: built with num_speculative_tokens = K >= 1.
        head: what tokens add to the logits after them.
        candidates: only so many of the largest base logits of a position (and those tied with the
            last) can be drawn; 0: all.
        draft_to_target: [D] int64 on the state's device, distinct ids of the target for each id of
            a draft model with a smaller vocabulary; the others cannot be drawn. Such logits cannot
            stay where they are, so "auto" does not take "vocab". None: the ids are the same.
        loop: where a step under `batch` runs the loop. "sharded": on owners. "replicated": every
            rank does all of it, for comparison: the same tokens. "auto": on owners, unless the
            logits are not sharded or `full_logits` is set; the log says so once. No batch is too
            small: on 2 H200s one request takes 342 us on its owner, 378 on every rank. Under
            `replicate` it is replicated anyway.
        full_logits: whether the drafter must see all logits on every rank, as a fused loop of its
            own would.

    Raises:
        ValueError: names the argument.
    """

    def __init__(
        self,
        state: SamplingState,
        head: MarkovHead,
        *,
        candidates: int = 0,
        draft_to_target: Tensor | None = None,
        loop: str = "auto",
        full_logits: bool = False,
    ) -> None:
        self.state = check.instance("state", state, SamplingState)
        self.head = check.instance("head", head, MarkovHead)
        self.K, V, D = state.num_speculative_tokens, state.vocab_size, head.draft_vocab_size
        if self.K == 0:
            raise ValueError("state must have num_speculative_tokens >= 1 to draft, got 0")
        if head.left[0].device != state.device:
            raise ValueError(f"head must lie on {state.device}, got {head.left[0].device}")
        if head.vocab_size != V:
            raise ValueError(f"head must have {V} rows in w1, got {head.vocab_size}")
        self.candidates = check.integer("candidates", candidates, 0)
        self.target_D = _id_map(draft_to_target, head, V, state.device)
        if self.target_D is None and (D < V or (D > V and not head.sharded)):
            raise ValueError(f"head must have {V} columns in w2 without draft_to_target, got {D}")
        self.loop = check.one_of("loop", loop, LOOPS)
        self.full_logits = check.instance("full_logits", full_logits, bool)
        if full_logits and loop == "sharded":
            raise ValueError('loop must be "auto" or "replicated" with full_logits, got "sharded"')
        self._bind()

    def _bind(self) -> None:
        """Say what draft logits need of the exchange."""
        state, reason = self.state, None
        if self.target_D is not None:
            reason = "draft_to_target moves logits to other ranks' ids"
        elif self.full_logits:
            reason = "the drafter needs full logits"
        if reason is not None and self.head.sharded:
            raise ValueError(f"w2 must be a plain tensor, got a DTensor: {reason}")
        if reason is not None and "vocab" in (state.exchange, state.settled_exchange):
            raise ValueError(f'exchange must not be "vocab": {reason}')
        if self.head.sharded and state.exchange not in ("vocab", "auto"):
            raise ValueError(
                f'w2 must be a plain tensor under "{state.exchange}", got a DTensor: owners add '
                "biases to whole rows"
            )
        state.needs_whole_rows = state.needs_whole_rows or reason
        state.expect_drafts("vocab" if self.head.sharded else None, loop=True)

    @torch.no_grad()
    def __call__(
        self,
        draft_logits: Tensor,
        plan: ShardPlan,
        last_token_ids: Tensor | Sequence[int],
        hidden: Tensor | None = None,
    ) -> DraftOutput:
        """Draft K tokens for each request; every rank of the axis must call this.

        Drafts that were kept of these requests are void, also if this fails in between.

        Args:
            draft_logits: DTensor [num_rows, K, D], the K positions of one request together, in the
                order in which `plan.select` gives its rows from hidden states [B, K, H]. Of one
                dtype over the life of the state, and under `vocab` padded as the target's are.
            plan: of one row a request. Positions do not advance: all drafts of a block are keyed
                by the position of its first token and by their step.
            last_token_ids: [B] int64 or int32, the last token of each request so far. A tensor on
                the state's device, which for a state on CPUs is any CPU tensor, is not looked at: a
                request whose entry is no id, as the -1 of a row that failed, drafts nothing. Other
                data is checked.
            hidden: [num_rows, K, H], what the logits were computed from, of a dtype that logits may
                have, plain or a DTensor Replicate(); needed, and only then, if the head tells
                confidences. NaN in it counts as 0.

        Returns:
            A named tuple of token_ids [B, K] and confidences [B, K] or None.

        Raises:
            ValueError: names the argument; before any collective, and on every rank alike if
                arguments are equal on all; otherwise use debug mode.
        """
        state, plan, error = self.state, check_plan(plan, self.state), None
        work, last_B, local = plan, torch.empty(0), hidden
        try:
            work = self._work(draft_logits, plan)
            last_B = self._last(last_token_ids, plan)
            local = self._hidden(hidden, work)
            state.drafts.check_columns(draft_logits, plan.slots)
            state.on_host(plan, _check)
            if any(_drawn(plan)):
                state.drafts.check_logits(draft_logits, plan.exchange)
        except ValueError as refused:
            error = refused
        rows = work.place(
            draft_logits,
            state,
            most_rows=1,
            steps=self.K,
            vocab_size=None if self.target_D is None else len(self.target_D),
            error=error,
            last_token_ids=last_B,
        )
        before_Q = last_B[work.row_requests]
        state.on_host(plan, forget_drafts)  # earlier drafts, whose logits are overwritten
        result_QW = self._draw(rows, work, before_Q, plan.exchange, draft_logits.shape[-1])
        state.on_host(plan, partial(_keep, K=self.K))  # now that they are
        if self.head.weight_H is not None and local is not None:
            result_QW = torch.cat([result_QW, self._confide(local, work, before_Q, result_QW)], 1)
        if work is not plan:  # of what every rank did, the owner's counts
            result_QW = plan.exchange.own_rows(result_QW, [plan.capacity] * state.axis.size)
        result_BW = plan.settle(result_QW)
        if self.head.weight_H is None:
            return DraftOutput(result_BW, None)
        token_BK, bits_BK = result_BW.split(self.K, 1)
        return DraftOutput(token_BK, bits_BK.to(torch.int32).view(torch.float32))

    def _draw(
        self, rows: Logits, plan: ShardPlan, before_Q: Tensor, keeping: Exchange, width: int
    ) -> Tensor:
        """[Q, K] int64 tokens of the requests here, from their rows of base logits in order.

        What they are drawn from is kept as under the exchange `keeping`.
        """
        state, where, K, V = self.state, plan.exchange, self.K, self.state.vocab_size
        Q, (params, position_Q, _), filters = before_Q.shape[0], plan.row_params(), plan.filters
        base_QKSv = rows.x_NSv.unflatten(0, (Q, K))
        floor_KQ = self._floors(rows, plan)
        right, W = self.head.right, V
        if where.name == "vocab":
            W = rows.x_NSv.shape[2]
            right = self.head.columns(state.axis, -(-width // state.axis.size))
        step_KQ = torch.arange(K, device=before_Q.device)[:, None].expand(K, Q).contiguous()
        counters = (x.expand(K, Q).flatten() for x in (params.seed, position_Q, step_KQ))
        uniform_KQ = ops.uniform(*counters, DRAFT).view(K, Q)
        token_QK = torch.full((Q, K), -1, device=before_Q.device)
        for k in range(K):
            floor_Q = None if floor_KQ is None else floor_KQ[k]
            factors = (*self.head.left, *right, self.target_D, W)
            x_QW = ops.markov(base_QKSv[:, k], floor_Q, before_Q, *factors)
            logits = Logits(x_QW[:, None], rows.first_id_S[:1])
            edited = process(logits, plan, width, own_drafts_RK=token_QK, count_R=step_KQ[k])
            drawn_Q5, row = draw(edited, params, uniform_KQ[k], filters, where, V)
            if filters.drawn:
                first_Q = plan.row_draft_rows
                state.drafts.write(logits, row, first_Q, k, params.greedy, keeping, width)
            before_Q = where.found(drawn_Q5[:, 0])
            token_QK[:, k] = before_Q
        return token_QK

    def _floors(self, rows: Logits, plan: ShardPlan) -> Tensor | None:
        """[K, Q] float32: the least base logit of each position's candidates."""
        N, device = rows.x_NSv.shape[0], rows.x_NSv.device
        D = self.state.vocab_size if self.target_D is None else len(self.target_D)
        if not 0 < self.candidates < D:
            return None
        one_N = torch.ones(N, device=device)
        k_N = torch.full((N,), self.candidates, device=device)
        top_p_N, none_N = torch.full_like(k_N, TOP_P_ONE), torch.zeros_like(k_N)
        params = RowParams(one_N, one_N * -torch.inf, k_N, top_p_N, none_N, none_N > 0)
        enough = next((size for size in CANDIDATES if size >= self.candidates), 0)
        filters = Filters(True, False, drawn=True, candidates=enough, bounded=enough > 0)
        return (
            weigh(rows, params, filters, plan.exchange, D).floor_R.view(-1, self.K).T.contiguous()
        )

    def _confide(
        self, hidden_NKH: Tensor, plan: ShardPlan, before_Q: Tensor, token_QK: Tensor
    ) -> Tensor:
        """[Q, K] int64: the bits of the confidence of each position."""
        assert self.head.weight_H is not None
        hidden_QKH = plan.exchange.own_rows(hidden_NKH, [plan.capacity] * self.state.axis.size)
        before_QK = torch.cat([before_Q[:, None], token_QK[:, :-1]], 1)
        offset_QK = self.head.offset_V[before_QK.clamp(min=0)]
        told_N = ops.confidence(hidden_QKH.flatten(0, 1), self.head.weight_H, offset_QK.flatten())
        bits_QK = told_N.view(torch.int32).to(torch.int64).view(before_QK.shape)
        return torch.where(before_QK < 0, 0, bits_QK)

    def _work(self, draft_logits: Tensor, plan: ShardPlan) -> ShardPlan:
        """The plan by which this rank loops: the one given, or one of all owners' rows."""
        if self.head.sharded:
            self._check_columns(draft_logits, plan)
        if self.state.axis.size == 1 or plan.exchange.name == "vocab":
            return plan
        reason = None
        if plan.exchange.name == "replicate":
            reason = "draft logits are kept on every rank"
        elif self.full_logits:
            reason = "the drafter needs full logits"
        elif isinstance(draft_logits, DTensor) and not any(
            isinstance(placement, Shard) and placement.dim % 3 == 2
            for placement in draft_logits.placements
        ):
            reason = "draft_logits are not sharded over the vocabulary"
        if self.loop == "auto" and reason is not None:
            say(self.state.axis, f"the drafting loop runs on every rank: {reason}")
        if plan.exchange.name == "batch" and (
            self.loop == "replicated" or (self.loop == "auto" and reason is not None)
        ):
            return everywhere(plan)
        return plan

    def _check_columns(self, draft_logits: Tensor, plan: ShardPlan) -> None:
        """ValueError unless the columns of a sharded w2 are those of the logits here."""
        if plan.exchange.name != "vocab":
            raise ValueError(
                f'exchange must be "vocab" with a w2 that is sharded, got "{plan.exchange.name}"'
            )
        shape = getattr(draft_logits, "shape", ()) or (0,)
        widths = [
            -(-columns // self.state.axis.size)
            for columns in (self.head.draft_vocab_size, shape[-1])
        ]
        if widths[0] != widths[1]:
            raise ValueError(
                f"w2 must have {widths[1]} columns a rank with padding, as draft_logits have, got "
                f"{widths[0]}"
            )

    def _last(self, given: Tensor | Sequence[int], plan: ShardPlan) -> Tensor:
        """[B] int64 tokens on the device, -1 for what is no id there; others are checked."""
        B, device, V = len(plan.batch_slots), self.state.device, self.state.vocab_size
        if isinstance(given, Tensor) and given.device == device and not isinstance(given, DTensor):
            if given.shape != (B,) or given.dtype not in (torch.int64, torch.int32):
                raise ValueError(
                    f"last_token_ids must be int64 of shape [{B}], got {given.dtype} of shape "
                    f"{list(given.shape)}"
                )
            last_B = given.to(torch.int64)
            return torch.where((last_B >= 0) & (last_B < V), last_B, -1)
        ids = check.integers("last_token_ids", given, B, 0, V - 1)
        return torch.tensor(ids, dtype=torch.int64).to(device, non_blocking=True)

    def _hidden(self, hidden: Tensor | None, plan: ShardPlan) -> Tensor | None:
        """Hidden states of all rows, plain; ValueError unless they are what the head needs."""
        weight_H = self.head.weight_H
        if (hidden is None) != (weight_H is None):
            wanted = "None, since the head tells no confidences"
            if weight_H is not None:
                wanted = "given, since the head tells confidences"
            raise ValueError(f"hidden must be {wanted}, got {type(hidden).__name__}")
        if hidden is None or weight_H is None:
            return None
        check.instance("hidden", hidden, Tensor)
        if isinstance(hidden, DTensor):
            if not all(placement.is_replicate() for placement in hidden.placements):
                raise ValueError(f"hidden must be Replicate(), got {hidden.placements}")
            hidden = hidden.to_local()
        shape = (plan.num_rows, self.K, len(weight_H))
        check.on_device("hidden", hidden, shape, DTYPES, self.state.device)
        return hidden


def everywhere(plan: ShardPlan) -> ShardPlan:
    """A plan of one row a request under `batch`, such that every rank has all owners' rows.

    Rows stay in the order in which owners have them. What a rank keeps are its own rows still.
    """
    state, rows = plan.state, plan.num_rows
    lanes, axis = len(plan.batch_slots), state.axis
    device = plan.batch_slots.device
    exists_B = plan.batch_slots < state.max_num_reqs
    place_B = torch.where(exists_B, plan.gathered_src_indices, rows)
    request_T = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    request_T = request_T.index_copy(0, place_B, torch.arange(lanes, device=device))[:rows]
    draft_row_T = torch.full((rows,), -1, device=device)
    mine = slice(axis.rank * plan.capacity, (axis.rank + 1) * plan.capacity)
    draft_row_T[mine] = plan.row_draft_rows
    return replace(
        plan,
        exchange=exchange_of("replicate", axis),
        row_requests=request_T,
        row_slots=plan.batch_slots[request_T],
        row_offsets=torch.zeros_like(request_T),
        row_draft_rows=draft_row_T,
    )


def _drawn(plan: ShardPlan) -> list[bool]:
    """[B] whether each request's drafts are drawn, and not chosen."""
    return [not request.params.greedy for request in plan.requests]


def _check(plan: ShardPlan) -> None:
    plan.state.drafts.check_step(plan, 0, _drawn(plan))


def _keep(plan: ShardPlan, K: int) -> None:
    plan.state.drafts.keep(plan, K - 1, _drawn(plan))


def _shape(name: str, tensor: object, ndim: int) -> tuple[int, ...]:
    """The shape of plain numbers; ValueError for anything else."""
    plain = check.instance(name, tensor, Tensor)
    if isinstance(plain, DTensor) or plain.ndim != ndim or not plain.is_floating_point():
        raise ValueError(
            f"{name} must be a plain floating-point tensor of {ndim} dims, got "
            f"{type(plain).__name__} of {plain.dtype} and shape {list(plain.shape)}"
        )
    _finite(name, plain)
    return tuple(plain.shape)


def _finite(name: str, tensor: Tensor) -> None:
    """ValueError if a weight is no number: every draft after it would be none."""
    if not tensor.isfinite().all():
        raise ValueError(f"{name} must be finite, got NaN or infinities")


def _factors(x_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Factors as `ops.markov` reads them fastest, and their scales."""
    factor_NF, scale_N = ops.quantized(x_NF)
    if factor_NF.is_cpu:  # whose products are of floats
        return factor_NF.to(torch.float32), scale_N
    F = max(1 << (factor_NF.shape[1] - 1).bit_length(), _FEWEST_FACTORS)
    padded_NF = torch.nn.functional.pad(factor_NF, (0, F - factor_NF.shape[1]))
    return padded_NF.contiguous(), scale_N


def _id_map(
    draft_to_target: Tensor | None, head: MarkovHead, V: int, device: torch.device
) -> Tensor | None:
    """The ids of the target, checked; ValueError if they are none."""
    if draft_to_target is None:
        return None
    D = head.draft_vocab_size
    ids = check.instance("draft_to_target", draft_to_target, Tensor)
    if ids.dtype != torch.int64 or ids.shape != (D,) or isinstance(ids, DTensor):
        raise ValueError(
            f"draft_to_target must be plain int64 of shape [{D}], as w2 has columns, got "
            f"{ids.dtype} of shape {list(ids.shape)}"
        )
    named = ids.tolist()
    if len(set(named)) < D or not all(0 <= id_ < V for id_ in named):
        raise ValueError(f"draft_to_target must be distinct ids in [0, {V - 1}]")
    return ids.to(device).contiguous()

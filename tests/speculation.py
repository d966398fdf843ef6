"""Steps with drafts: random ones, the oracle's answers to them, and what a rank does with them.

B requests, V true vocabulary, W >= V the width of the logits (padding included), K the state's
num_speculative_tokens, k <= K the drafts of one request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    SamplerOutput,
    SamplingParams,
    SamplingState,
    ShardPlan,
)
from tests import oracle
from tests.batches import Layout, library_weights, random_batch, random_params, shard_vocab


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request with k drafts."""

    params: SamplingParams
    position: int
    target: torch.Tensor
    """[k + 1, W], on the CPU."""
    draft: torch.Tensor | None
    """[k, W'], what its drafts are drawn from; None: they are chosen."""
    chosen: dict[int, int] = field(default_factory=dict)
    """Ids by place: all drafts of a chosen block; otherwise what takes the place of a drawn one."""

    @property
    def k(self) -> int:
        return len(self.target) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """One step of B requests."""

    requests: list[Request]
    vocab_size: int
    K: int
    base_seed: int

    def __len__(self) -> int:
        return len(self.requests)


def random_speculation(
    seed: int,
    size: int,
    vocab_size: int,
    K: int,
    *,
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype = torch.float32,
    padding: int = 0,
    draft_padding: int | None = None,
) -> Speculation:
    """Requests of every kind, a few of which are greedy, chosen, without drafts, or broken."""
    rng = np.random.default_rng(seed)
    draft_padding = padding if draft_padding is None else draft_padding
    requests = []
    for i in range(size):
        k = int(rng.choice([0, 1, K, K, K]))
        numbers = rng.integers(2**32, size=2).tolist()
        target = random_batch(numbers[0], k + 1, vocab_size, dtype=dtype, padding=padding).logits
        draft = random_batch(
            numbers[1], k, vocab_size, dtype=draft_dtype, padding=draft_padding
        ).logits
        if rng.random() < 0.7:  # a draft that knows its target
            noise = float(rng.choice([0, 0, 0.3, 1])) * torch.from_numpy(rng.normal(0, 1, (k, 1)))
            near = target[:k, :vocab_size].float() + noise * torch.randn(
                (k, vocab_size), generator=torch.Generator().manual_seed(numbers[0])
            )
            draft[:, :vocab_size] = near.to(draft_dtype)
        drawn = bool(rng.random() < 0.65)
        likely = target[:k, :vocab_size].float().nan_to_num(-torch.inf).argmax(1).tolist()
        any_id = rng.integers(vocab_size, size=k).tolist()
        chosen = {} if drawn else {j: (likely, any_id)[rng.random() < 0.2][j] for j in range(k)}
        if k and drawn and rng.random() < 0.2:  # nothing to draw from, and yet an id
            empty = int(rng.integers(k))
            draft[empty] = float(rng.choice([-np.inf, np.nan]))
            chosen[empty] = likely[empty]
        if k and rng.random() < 0.25:
            bad = (-1, -1, vocab_size, vocab_size + padding, 2**40, -(2**62))
            chosen[int(rng.integers(k))] = int(rng.choice(bad))
        requests.append(
            Request(
                params=random_params(rng, vocab_size),
                position=int(rng.choice([0, 3, 2**31, 2**40 + 3])) + i,
                target=target,
                draft=draft if drawn else None,
                chosen=chosen,
            )
        )
    return Speculation(
        requests=requests, vocab_size=vocab_size, K=K, base_seed=int(rng.integers(2**63))
    )


# --- the oracle's answers


def expected(
    step: Speculation,
    method: str,
    order: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
) -> dict[str, list]:
    """What `speculative_step` must give."""
    unseeded = [r.params.seed is None for r in step.requests]
    answers, drafts = [], []
    for i in range(len(step)) if order is None else order:
        request = step.requests[i]
        seed = request.params.seed
        if seed is None:
            seed = oracle.unseeded_seed(step.base_seed, sum(unseeded[:i]))
        count = request.k if counts is None else counts[i]
        ids, verified = answer(request, step.vocab_size, seed, method, count)
        drafts.append(ids + [-1] * (step.K - len(ids)))
        answers.append(verified)
    return {
        "drafts": drafts,
        "token_ids": [a.tokens + [-1] * (step.K + 1 - len(a.tokens)) for a in answers],
        "num_sampled": [len(a.tokens) for a in answers],
        "num_rejected": [a.num_rejected for a in answers],
        "num_nans": [a.num_nans for a in answers],
        "failed": [a.failed for a in answers],
    }


def answer(
    request: Request, vocab_size: int, seed: int, method: str, count: int
) -> tuple[list[int], oracle.Verified]:
    """A request's submitted drafts, and what it emits if `count` of them are admitted."""
    rows, draft_rows = (
        rows_of(x, request.params, vocab_size) for x in (request.target, request.draft)
    )
    where: dict[str, Any] = {"seed": seed, "position": request.position}
    ids = [
        request.chosen[j]
        if j in request.chosen
        else oracle.draft(draft_rows[j], request.params, step=j, **where)
        for j in range(request.k)
    ]
    drawn_from: list[oracle.Row | None] = [*draft_rows] or [None] * request.k
    admitted = rows[: count + 1], ids[:count], drawn_from[:count]
    verified = oracle.verify(*admitted, request.params, method=method, **where)
    return ids, verified


def rows_of(
    logits: torch.Tensor | None, params: SamplingParams, vocab_size: int
) -> list[oracle.Row]:
    if logits is None:
        return []
    row_of = partial(
        oracle.row_of,
        vocab_size=vocab_size,
        largest=torch.finfo(logits.dtype).max,
        weights=library_weights,
    )
    return [row_of(row, params) for row in logits.float().numpy()]


# --- what a rank does


def speculative_step(
    mesh,
    step: Speculation,
    layout: Layout,
    method: str,
    counts: Sequence[int] | None = None,
    spare: int = 0,
) -> dict[str, list]:
    """Drafts and outputs, as lists, of `speculative_output`."""
    drafts, output = speculative_output(mesh, step, layout, method, counts=counts, spare=spare)
    names = ("token_ids", "num_sampled", "num_rejected", "num_nans", "failed")
    return {"drafts": drafts, **{name: getattr(output, name).tolist() for name in names}}


def speculative_output(
    mesh,
    step: Speculation,
    layout: Layout,
    method: str,
    mode: str = "raw_logprobs",
    counts: Sequence[int] | None = None,
    spare: int = 0,
) -> tuple[list[list[int]], SamplerOutput]:
    """Draft and verify, as an engine that admitted all requests: outputs of `layout.order`.

    `counts` are the admitted drafts of each request, under a budget with `spare` more of them.
    """
    slots = list(range(len(step)) if layout.slots is None else layout.slots)
    order = list(range(len(step)) if layout.order is None else layout.order)
    state = SamplingState(
        mesh,
        vocab_size=step.vocab_size,
        max_num_reqs=max(slots, default=0) + 1,
        num_speculative_tokens=step.K,
        logprobs_mode=mode,
        seed=step.base_seed,
    )
    for slot, request in zip(slots, step.requests, strict=True):
        state.add(slot, request.params, position=request.position)
    sharder = BatchSharder(state, owners=layout.owners)

    def plan_for(
        requests: list[int], rows: list[int] | None = None, budget: int | None = None
    ) -> ShardPlan:
        chosen = [slots[i] for i in requests]
        plan_of = partial(sharder.plan, chosen, rows, exchange=layout.exchange, budget=budget)
        return plan_of(capacity=plan_of().capacity + layout.spare) if layout.spare else plan_of()

    # Drafts, of fewer requests at each further step; the batch is in another order at each.
    drafts = {i: [-1] * step.K for i in order}
    drafter = DraftSampler(state)
    for j in range(step.K):
        rows_of_draft = {i: step.requests[i].draft for i in order[:: (-1) ** j]}
        drawing = {i: x[j] for i, x in rows_of_draft.items() if x is not None and j < len(x)}
        if not drawing:
            break
        plan = plan_for(list(drawing))
        rows = torch.stack(list(drawing.values())).to(mesh.device_type)
        drawn = drafter(shard_vocab(plan.select(rows), mesh), plan, step=j).tolist()
        for i, token in zip(drawing, drawn, strict=True):
            drafts[i][j] = token
    for i in order:
        for j, token in step.requests[i].chosen.items():
            drafts[i][j] = token

    most = [step.requests[i].k + 1 for i in order]
    budget = None if counts is None else sum(counts[i] for i in order) + spare
    plan = plan_for(order, most, budget)
    width = step.requests[0].target.shape[1] if step.requests else step.vocab_size
    rows = torch.cat([torch.empty(0, width), *[step.requests[i].target for i in order]])
    if step.requests:
        rows = rows.to(step.requests[0].target.dtype)
    rows = rows.to(mesh.device_type)
    if counts is not None:
        given = torch.tensor([counts[i] for i in order], dtype=torch.int64)
        plan = plan.admit(given.to(mesh.device_type))
        first = torch.tensor([0, *np.cumsum(most)]).to(mesh.device_type)
        rows = rows[first[plan.hidden_requests] + plan.hidden_offsets]
    logits = shard_vocab(plan.select(rows), mesh)
    submitted = [drafts[i] for i in order]
    verifier = RejectionSampler(state, method=method, compile=layout.compile)
    output = verifier(logits, plan, submitted)
    advanced = state.positions[[slots[i] for i in order]].tolist()
    begun = [step.requests[i].position for i in order]
    emitted = output.num_sampled.tolist()
    assert advanced == [b + n for b, n in zip(begun, emitted, strict=True)]
    return submitted, output


def emitted(engine: Any, steps: int) -> tuple[Tensor, float]:
    """[B, steps] the first ids that each request emits in so many steps; and ids per step.

    An engine has `context`, an entry for each request, `K`, and `step`, which gives token ids
    [B, K + 1] and how many of each request.
    """
    requests, K = len(engine.context), engine.K
    ids = torch.full((requests, steps * (K + 1) + K + 1), -1)
    length, place = torch.zeros(requests, 1, dtype=torch.int64), torch.arange(K + 1)
    for _ in range(steps):
        tokens, count = engine.step()
        ids.scatter_(1, length + place, tokens.cpu())  # what is too much is written over
        length += count[:, None].cpu()
    return ids[:, :steps], length.double().mean().item() / steps

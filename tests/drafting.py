"""Engines that draft blocks left to right, and what their steps must give.

A script is a list of events that all ranks play, and beside it the oracle's answers. Requests,
their parameters and what they have said so far are those of `tests.processing`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dtensor_sample import (
    BatchSharder,
    GraphedStep,
    RejectionSampler,
    SamplingParams,
    SamplingState,
    replicated,
)
from dtensor_sample.draft.sequential import MarkovHead, SequentialDraftSampler
from tests import oracle
from tests.batches import OWNERS, random_batch, random_params, shard_vocab
from tests.processing import OUTPUTS, Live, random_processing

H = 6


@dataclass
class Step:
    """One step of B requests: draft K tokens each, then verify them."""

    slots: list[int]
    base: torch.Tensor
    """[B, K, D + padding]."""
    last: list[int]
    hidden: torch.Tensor
    """[B, K, H]."""
    target: torch.Tensor
    """[B * (K + 1), V + padding]."""
    owners: str
    rows: list[int]
    """[B] rows of each request, at most."""
    budget: int | None = None
    """How many drafts are verified at most, those likeliest to be accepted; None: all."""


class Script:
    """Random events of an engine; `sizes` are the numbers of requests of its steps, in order."""

    def __init__(
        self,
        seed: int,
        sizes: Sequence[int],
        *,
        V: int = 13,
        D: int | None = None,
        K: int = 3,
        r: int = 5,
        dtype: torch.dtype = torch.bfloat16,
        padding: int = 0,
        candidates: int = 0,
        edited: bool = False,
        greedy: bool = False,
        w1: float = 1.0,
        budgets: bool = False,
        method: str = "block",
    ) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.V, self.D, self.K = V, D or V, K
        self.dtype, self.padding, self.candidates = dtype, padding, candidates
        self.edited, self.greedy, self.slots = edited, greedy, max(sizes, default=0) + 2
        self.budgets, self.method = budgets, method
        self.map = None if D is None else rng.permutation(V)[:D].tolist()

        def numbers(*shape: int) -> np.ndarray:
            return rng.normal(0, 1, shape).astype(np.float32)

        self.w1, self.w2 = numbers(V, r) * np.float32(w1), numbers(r, self.D)
        self.w1[rng.integers(V)] = 0
        self.weight, self.bias = numbers(H + r), float(rng.normal())
        self.live: dict[int, Live] = {}
        self.events: list[tuple[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        for size in sizes:
            self.change(size)
            self.step(size)

    def change(self, size: int) -> None:
        """Remove a request or two, and add until there are enough."""
        rng = self.rng
        for slot in rng.permutation(sorted(self.live))[:2].tolist():
            if rng.random() < 0.5:
                del self.live[slot]
                self.events.append(("remove", slot))
        while len(self.live) < size:
            slot = int(rng.choice([s for s in range(self.slots) if s not in self.live]))
            params = random_params(rng, self.V, seeded=True)
            if self.edited:
                params = random_processing(rng, self.V)
            if self.greedy:
                params = SamplingParams(temperature=0.0, seed=1)
            prompt = rng.integers(0, self.V, rng.integers(1, 6)).tolist()
            self.live[slot] = Live(params, prompt, [])
            self.events.append(("add", (slot, params, prompt)))

    def logits(self, rows: int, width: int) -> torch.Tensor:
        """Mild rows for the most part, that drafts be accepted now and then."""
        made = random_batch(int(self.rng.integers(2**32)), rows, width, padding=self.padding)
        return (made.logits / 4).to(self.dtype)

    def step(self, size: int) -> None:
        rng, K = self.rng, self.K
        slots = rng.permutation(sorted(self.live))[:size].tolist()
        step = Step(
            slots=slots,
            base=self.logits(size * K, self.D).view(size, K, self.D + self.padding),
            last=[[*self.live[slot].prompt, *self.live[slot].output][-1] for slot in slots],
            hidden=torch.from_numpy(rng.normal(0, 1, (size, K, H))).bfloat16(),
            target=self.logits(size * (K + 1), self.V),
            owners=str(rng.choice(OWNERS)),
            rows=[K + 1] * size,
        )
        if self.budgets:
            step.rows = rng.integers(1, K + 2, size).tolist() if rng.random() < 0.4 else step.rows
            step.budget = int(rng.choice([size // 2, size, size, size * K // 2, 0, 10**6]))
        if rng.random() < 0.3 and size:
            step.base[0, K // 2] = torch.nan  # ends the block
        told, drafts, drawn_from, targets = [], [], [], []
        for i, slot in enumerate(slots):
            live = self.live[slot]
            ids, rows, stored, chances = self.drafted(step, i)
            told.append(chances)
            drafts.append(ids)
            target = step.target[i * (K + 1) : (i + 1) * (K + 1)]
            if rng.random() < 0.6:  # a draft that knows its target
                near = torch.stack(stored).float()
                noise = torch.from_numpy(rng.normal(0, 0.3, near.shape).astype(np.float32))
                target[:K, : self.V] = (near + noise).to(self.dtype)
            text = [x if x >= 0 else 0 for x in ids]
            targets.append([live.row(x, self.V, text[:j]) for j, x in enumerate(target)])
            drawn_from.append(rows)
        counts = [K] * size
        if step.budget is not None:
            limits = [n - 1 for n in step.rows]
            counts = oracle.admitted(told, drafts, limits, step.budget, self.V)
        verified = []
        for slot, count, p, ids, q in zip(slots, counts, targets, drafts, drawn_from, strict=True):
            live = self.live[slot]
            p, ids, q = p[: count + 1], ids[:count], q[:count]
            how: dict[str, Any] = {"method": self.method, **live.where}
            verified.append(oracle.verify(p, ids, q, live.params, **how))
            live.output += verified[-1].tokens
        J = K + 1
        self.events.append(("step", step))
        self.answers.append(
            {
                "drafts": drafts,
                "token_ids": [a.tokens + [-1] * (J - len(a.tokens)) for a in verified],
                "num_sampled": [len(a.tokens) for a in verified],
                "num_rejected": [a.num_rejected for a in verified],
                "num_nans": [a.num_nans for a in verified],
                "failed": [a.failed for a in verified],
                "confidences": told,
                "counts": counts,
            }
        )

    def drafted(self, step: Step, i: int) -> tuple[list[int], list[Any], list[Any], list[float]]:
        """K ids, what each was drawn from, its logits, and how likely it was to be accepted."""
        live = self.live[step.slots[i]]
        before = step.last[i]
        ids: list[int] = []
        rows: list[Any] = []
        kept: list[torch.Tensor] = []
        chances: list[float] = []
        for k in range(self.K):
            if before < 0:
                ids.append(-1)
                rows.append(None)
                kept.append(torch.full((self.V,), -torch.inf))
                chances.append(0.0)
                continue
            base = step.base[i, k, : self.D].float().numpy()
            values = oracle.markov(base, before, self.w1, self.w2, self.candidates)
            whole = np.full(self.V, -np.inf, np.float32)
            whole[self.map if self.map is not None else slice(None)] = values
            stored = torch.from_numpy(whole).to(self.dtype)
            kept.append(stored)
            rows.append(live.row(stored, self.V, ids))
            hidden = step.hidden[i, k].float().numpy()
            chances.append(oracle.confidence(hidden, self.w1[before], self.weight, self.bias))
            before = oracle.draft(rows[-1], live.params, step=k, **live.where)
            ids.append(before)
        return ids, rows, kept, chances


def head_of(mesh, script: Script, *, sharded: bool = False) -> MarkovHead:
    w1, w2, weight = (
        torch.from_numpy(x).to(mesh.device_type) for x in (script.w1, script.w2, script.weight)
    )
    if sharded:
        # Columns as the logits have them, padding of the vocabulary included.
        w2 = shard_vocab(torch.nn.functional.pad(w2, (0, script.padding)), mesh)
    return MarkovHead(w1, w2, confidence=weight, confidence_bias=script.bias)


def state_of(mesh, script: Script, exchange: str) -> SamplingState:
    return SamplingState(
        mesh,
        vocab_size=script.V,
        max_num_reqs=script.slots,
        num_speculative_tokens=script.K,
        exchange=exchange,
        seed=0,
    )


def sampler_of(
    mesh, script: Script, state: SamplingState, loop: str, *, sharded: bool = False, **kwargs: Any
) -> SequentialDraftSampler:
    ids = None
    if script.map is not None:
        ids = torch.tensor(script.map, device=mesh.device_type)
    head = head_of(mesh, script, sharded=sharded)
    return SequentialDraftSampler(
        state, head, candidates=script.candidates, draft_to_target=ids, loop=loop, **kwargs
    )


def play(
    mesh, script: Script, exchange: str, loop: str, *, sharded: bool = False, poison: bool = False
) -> list[dict[str, Any]]:
    """What the steps of a script give on one rank; with `poison`, what is not written is NaN."""
    state = state_of(mesh, script, exchange)
    drafter = sampler_of(mesh, script, state, loop, sharded=sharded)
    verifier, results = RejectionSampler(state, method=script.method), []
    for step in steps_of(script, state):
        if poison:
            spoil(state, exchange, [])
        results.append(run_step(mesh, state, drafter, verifier, step))
    return results


def spoil(state: SamplingState, exchange: str, kept: list[int]) -> None:
    """Make nonsense of what the draft cache has under an exchange, but in the rows `kept`."""
    cache = state.drafts.logits(exchange)
    if cache is None:
        return
    void = torch.ones(len(cache), dtype=torch.bool)
    void[kept] = False
    void = void.to(cache.device)
    for rows in (cache, *(field[: len(cache)] for field in state.drafts._fields)):
        rows[void] = torch.nan if rows.is_floating_point() else 1 << 40


def steps_of(script: Script, state: SamplingState) -> Iterator[Step]:
    """The steps of a script, between which requests of the state come and go."""
    for name, what in script.events:
        if name == "add":
            slot, params, prompt = what
            state.add(slot, params, prompt_token_ids=prompt)
        elif name == "remove":
            state.remove(what)
        else:
            yield what


def play_graphed(
    mesh, script: Script, exchange: str, capacities: list[int]
) -> tuple[list[dict[str, Any]], int]:
    """The same in one function of two plans, as graphs where there are; and how many there were."""
    state, K, results = state_of(mesh, script, exchange), script.K, []
    drafter = sampler_of(mesh, script, state, "auto")
    verifier = RejectionSampler(state, method=script.method)

    def run(plans, base, hidden, last, target) -> dict[str, Any]:
        drafting, plan = plans
        logits = shard_vocab(drafting.select(base), mesh)
        drafts, confidences = drafter(logits, drafting, last, drafting.select(hidden))
        plan = plan.admit(plan.best_first(confidences, drafts))
        rows = target[plan.hidden_requests, plan.hidden_offsets]
        output = verifier(shard_vocab(plan.select(rows), mesh), plan, drafts)
        told = {"drafts": drafts, "confidences": confidences, "counts": plan.counts}
        return {name: getattr(output, name) for name in OUTPUTS} | told

    graphed = GraphedStep(run, state, capacities=capacities)
    for step in steps_of(script, state):
        drafting = graphed.plan(step.slots)
        plan = graphed.plan(step.slots, step.rows, budget=step.budget, after=drafting)
        target = step.target.unflatten(0, (-1, K + 1)) if step.slots else step.target[:, None]
        given = step.base, step.hidden, torch.tensor(step.last, dtype=torch.int64), target
        result = graphed((drafting, plan), *(x.to(mesh.device_type) for x in given))
        results.append({name: x.tolist() for name, x in result.items()})
    count = graphed.num_graphs
    graphed.close()
    return results, count


def begun(mesh, script: Script, exchange: str) -> tuple[SamplingState, Step]:
    """A state with the requests of a script of one step, and that step."""
    state = state_of(mesh, script, exchange)
    *added, (_, step) = script.events
    for _, (slot, params, prompt) in added:
        state.add(slot, params, prompt_token_ids=prompt)
    return state, step


def draft(mesh, drafter, step: Step, plan, *, whole: bool = False):
    """Draft as an engine does, whose lm_head gives `step.base`; `whole`: to every rank."""
    base, hidden = (plan.select(x.to(mesh.device_type)) for x in (step.base, step.hidden))
    logits = replicated(base, mesh) if whole else shard_vocab(base, mesh)
    return drafter(logits, plan, step.last, hidden)


def run_step(mesh, state, drafter, verifier, step: Step) -> dict[str, Any]:
    sharder = BatchSharder(state, owners=step.owners)
    K = state.num_speculative_tokens
    drafts, confidences = draft(mesh, drafter, step, sharder.plan(step.slots))
    plan = sharder.plan(step.slots, step.rows, budget=step.budget)
    rows, counts = step.target.to(mesh.device_type), [K] * len(step.slots)
    if step.budget is not None:
        plan = plan.admit(plan.best_first(confidences, drafts))
        assert plan.counts is not None
        rows, counts = (
            rows[plan.hidden_requests * (K + 1) + plan.hidden_offsets],
            plan.counts.tolist(),
        )
    output = verifier(shard_vocab(plan.select(rows), mesh), plan, drafts)
    result: dict[str, Any] = {name: getattr(output, name).tolist() for name in OUTPUTS}
    told = {"drafts": drafts.tolist(), "confidences": confidences.tolist(), "counts": counts}
    return result | told

"""Steps that verify the likeliest drafts of a batch: who is admitted, and that it biases nothing.

A plan with a budget whose drafts are admitted on the device must do what a plan does that knew from
the start how many drafts each request has; and if drafts are admitted on what was known before they
were drawn, what is emitted follows p, jointly over requests.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction as F
from functools import cache, partial, reduce
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    GraphedStep,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    ShardPlan,
    TokenBitmask,
)
from dtensor_sample.draft.admit import best_first
from tests import oracle
from tests.batches import EXCHANGES, OWNERS, shard_vocab
from tests.pool import FEW_WORLDS, worlds
from tests.speculation import Speculation, emitted, expected, random_speculation, speculative_step
from tests.test_collectives import KINDS, CollectiveTrace
from tests.test_distribution import p_value
from tests.test_draft_collectives import sent_bytes
from tests.test_draft_distribution import FAR_APART, IN_CONTEXT, STEPS, Engine, law
from tests.test_drafts import random_layouts

METHODS = ("standard", "block")
TOLD: tuple[dict[str, Any], ...] = ({}, {"logprobs": 2}, {"kept_capacity": 3, "entropy": True})
Counts = Sequence[int]


# --- who is admitted


def counts_of(confidences: Any, drafts: Any, limits: Counts, budget: int, size: int) -> list[int]:
    given = torch.as_tensor(confidences), torch.tensor(drafts)
    return best_first(*given, torch.tensor(limits), torch.tensor([budget]), size).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_best_first(dtype):
    """Catches ties in another order, a draft before its predecessor, NaN, and ends of blocks."""
    rng = np.random.default_rng(0)
    for case in range(300):
        B, K, V = int(rng.integers(1, 7)), int(rng.integers(1, 6)), 9
        confidences = torch.from_numpy(rng.random((B, K))).to(dtype)
        if case % 2:  # many ties, and what is no probability
            some = [0.0, 0.25, 0.5, 1.0, 1.0, np.nan, np.inf, -np.inf, -3.0, 1.5]
            confidences = torch.from_numpy(rng.choice(some, (B, K))).to(dtype)
        drafts = rng.choice([*range(V), -1, V, 2**40], (B, K), p=[0.1] * V + [0.06, 0.02, 0.02])
        limits = rng.integers(-1, K + 1, B).tolist()
        budget = int(rng.choice([0, 1, 2, B * K // 2, B * K, 1000]))
        wanted = oracle.admitted(confidences.tolist(), drafts.tolist(), limits, budget, V)
        assert counts_of(confidences, drafts.tolist(), limits, budget, V) == wanted
        assert sum(wanted) <= budget


def test_best_first_by_hand():
    """Two requests, of which the second is sure of its first draft and of little else."""
    confidences = [[0.8, 0.8, 0.8], [1.0, 0.3, 1.0]]
    drafts, limits = [[1, 1, 1], [1, 1, 1]], [3, 3]
    for budget, wanted in enumerate([[0, 0], [0, 1], [1, 1], [2, 1], [3, 1], [3, 2], [3, 3]]):
        assert counts_of(confidences, drafts, limits, budget, 2) == wanted
    assert counts_of(confidences, [[1, -1, 1], [1, 1, 1]], limits, 3, 2) == [1, 2]
    assert counts_of(confidences, drafts, [1, 3], 3, 2) == [1, 2]


@pytest.mark.slow
def test_best_first_compiled():
    """Catches a graph break, and products that generated code rounds otherwise."""
    rng = np.random.default_rng(1)
    compiled = torch.compile(best_first, fullgraph=True, dynamic=True)
    for B, K in ((3, 4), (7, 2), (64, 7)):
        confidences = torch.from_numpy(rng.random((B, K), dtype=np.float32))
        drafts, limits = torch.zeros((B, K), dtype=torch.int64), torch.full((B,), K)
        args = (confidences, drafts, limits, torch.tensor([B]), 5)
        assert torch.equal(compiled(*args), best_first(*args))


# --- what is emitted, by enumeration

Row = list[F]


class Source:
    """One request: the target and the draft after every context, and how sure one is of each."""

    def __init__(self, rng: np.random.Generator, V: int, K: int) -> None:
        self.p: dict[tuple[int, ...], Row] = {}
        self.q: dict[tuple[int, ...], Row] = {}
        self.confidence: dict[tuple[int, ...], float] = {}
        for length in range(K + 1):
            for context in itertools.product(range(V), repeat=length):
                p, q = (rng.integers(0, 9, V) + np.eye(V, dtype=int)[0] for _ in range(2))
                self.p[context] = [F(int(n), int(p.sum())) for n in p]
                self.q[context] = [F(int(n), int(q.sum())) for n in q]
                pairs = zip(self.p[context], self.q[context], strict=True)
                accepted = sum(min(pair) for pair in pairs)
                self.confidence[context] = float(accepted) if rng.random() < 0.7 else rng.random()

    def confidences(self, drafts: tuple[int, ...]) -> list[float]:
        """Of each draft, by what comes before it."""
        return [self.confidence[drafts[:i]] for i in range(len(drafts))]

    def late(self, drafts: tuple[int, ...]) -> list[float]:
        """Of each draft, by itself too."""
        return [self.confidence[drafts[: i + 1]] for i in range(len(drafts))]

    def peeking(self, drafts: tuple[int, ...]) -> list[float]:
        """The chance that each draft, now that it is drawn, is accepted: known too late."""
        rows = [(self.p[drafts[:i]], self.q[drafts[:i]], x) for i, x in enumerate(drafts)]
        return [min(1.0, float(p[x] / q[x])) for p, q, x in rows]


Rule = Callable[[Source, tuple[int, ...]], list[float]]


def joint_distance(
    sources: Sequence[Source], V: int, K: int, budget: int, method: str, known: Rule
) -> tuple[float, set[tuple[int, ...]]]:
    """Total variation of what all requests emit, together, from p; and all counts there were."""
    texts = list(itertools.product(range(V), repeat=K + 1))
    paths = list(itertools.product(range(V), repeat=K))

    @cache
    def law_of(b: int, drafts: tuple[int, ...]) -> np.ndarray:
        """[texts] what request b emits if these drafts are verified."""
        found: dict[tuple[int, ...], Any] = dict.fromkeys(texts, F(0))
        of = sources[b].p.__getitem__, sources[b].q.__getitem__
        oracle.add_emitted(found, *of, drafts, F(1), V, method)
        return np.array([float(chance) for chance in found.values()])

    joint, seen = np.zeros((len(texts),) * len(sources)), set()
    for drawn in itertools.product(paths, repeat=len(sources)):
        pairs = list(zip(sources, drawn, strict=True))
        chance = math.prod(oracle.draft_chance(s.q.__getitem__, path) for s, path in pairs)
        if not chance:
            continue
        confidences = [known(source, path) for source, path in pairs]
        drafts, limits = [list(path) for path in drawn], [K] * len(sources)
        counts = counts_of(np.array(confidences), drafts, limits, budget, V)
        assert counts == oracle.admitted(confidences, drafts, limits, budget, V)
        seen.add(tuple(counts))
        laws = [law_of(b, path[:n]) for b, (path, n) in enumerate(zip(drawn, counts, strict=True))]
        joint += float(chance) * reduce(np.multiply.outer, laws)
    exact = [oracle.target_law(source.p.__getitem__, K, V).values() for source in sources]
    wanted = reduce(np.multiply.outer, [np.array([float(x) for x in own]) for own in exact])
    return float(np.abs(joint - wanted).sum() / 2), seen


SHAPES = [
    # Requests, V, K, budget, and the seed of the models
    (2, 3, 2, 2, 6),
    (3, 2, 2, 3, 17),
    (2, 2, 3, 3, 17),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_joint_law(shape, method):
    """Every draft of all requests, who is admitted, what then comes out, each with its chance.

    Confidences differ by the drafts before. Catches an admission that depends on a draft not yet
    revealed, of whichever request. The same sum is off for drafts admitted by their own tokens.
    """
    B, V, K, budget, seed = shape
    rng = np.random.default_rng(seed)
    step = ([Source(rng, V, K) for _ in range(B)], V, K, budget, method)
    distance, counts = joint_distance(*step, Source.confidences)
    assert distance < 1e-14
    assert len(counts) > 1  # who is admitted does depend on what was drawn
    assert all(sum(own) == budget for own in counts)
    late, peeking = (joint_distance(*step, wrong)[0] for wrong in (Source.late, Source.peeking))
    assert late > 0.01
    assert peeking > 0.1


# --- the law of many steps


class Admitting(Engine):
    """Verifies less than half of the drafts, by a confidence that each context has."""

    peek = False

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        contexts, B = [self.context], len(self.slots)
        for step in range(self.K):
            rows = shard_vocab(self.draft_plan.select(self.log_q[contexts[-1]]), self.mesh)
            contexts.append(1 + self.drafter(rows, self.draft_plan, step=step))
        if self.plan is None:
            budget = 2 * B * self.K // 5
            self.plan = self.sharder.plan(self.slots, [self.K + 1] * B, budget=budget)
        text = torch.stack(contexts, 1)
        drafts = text[:, 1:] - 1
        p, q = self.log_p.exp(), self.log_q.exp()
        if self.peek:
            confidences = (p / q)[text[:, :-1], drafts].clamp(max=1)
        else:
            confidences = torch.minimum(p, q).sum(1)[text[:, :-1]]
        plan = self.plan.admit(self.plan.best_first(confidences, drafts))
        hidden = self.log_p[text[plan.hidden_requests, plan.hidden_offsets]]
        output = self.verifier(shard_vocab(plan.select(hidden), self.mesh), plan, drafts)
        last = output.token_ids.gather(1, output.num_sampled[:, None] - 1)[:, 0]
        self.context = 1 + last
        return output.token_ids, output.num_sampled


class Peeking(Admitting):
    peek = True


def sequences(mesh, kind: type[Engine], *args: Any) -> torch.Tensor:
    """[B, STEPS] the first ids that each request emits in so many steps."""
    return emitted(kind(mesh, *args), STEPS)[0]


@worlds("cpu:1", "cuda:1")
@pytest.mark.parametrize("method", METHODS)
def test_law_of_sequences(ranks, method):
    """Catches a bias in what ranks do, over consecutive steps; with a rule that must fail."""
    for model in (IN_CONTEXT, FAR_APART):
        chances = []
        for kind in (Admitting, Peeking):
            args = (model, 2_000, 2, method, 6)
            drawn = ranks.run(sequences, kind, *args, timeout=110)[0]
            cells = np.ravel_multi_index(tuple(drawn.T.numpy()), (3,) * STEPS)
            counts = np.bincount(cells, minlength=3**STEPS)
            chances.append(p_value(counts, law(model[0]).ravel()))
        assert chances[0] > 1e-4
        assert chances[1] < 1e-9


# --- what a step does


def run_admitted(mesh, steps, layouts, counts, method) -> list[dict[str, list]]:
    return [
        speculative_step(mesh, step, layout, method, own, spare=i % 3)
        for i, (step, layout, own) in enumerate(zip(steps, layouts, counts, strict=True))
    ]


def random_counts(step: Speculation, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    how = seed % 4
    most = [request.k for request in step.requests]
    return [[0, int(rng.integers(k + 1)), k, k if rng.random() < 0.3 else 0][how] for k in most]


@pytest.mark.parametrize("method", METHODS)
def test_layouts(ranks, method):
    """Catches a row, draft, coin, position or count of another place, in some order or exchange.

    With no draft admitted, some, or all; with room to spare; owners uneven or empty.
    """
    step = random_speculation(78, 13, 37, 3, padding=2, draft_dtype=torch.bfloat16)
    layouts = random_layouts(step, 9)
    counts = [random_counts(step, seed) for seed in range(len(layouts))]
    wanted = [
        expected(step, method, layout.order, own)
        for layout, own in zip(layouts, counts, strict=True)
    ]
    steps = [step] * len(layouts)
    for results in ranks.run(run_admitted, steps, layouts, counts, method):
        assert results == wanted


def same_as_planned(mesh, exchange: str, capacity: int | None) -> list[str]:
    """What differs between admitted plans and plans that knew: their indices and their outputs."""
    rng, found = np.random.default_rng(4), []
    state = SamplingState(
        mesh, vocab_size=11, max_num_reqs=9, num_speculative_tokens=3, exchange=exchange, seed=0
    )
    for slot in range(9):
        told = TOLD[slot % len(TOLD)]
        state.add(slot, SamplingParams(temperature=0.5 * (slot % 3), **told))
    verifier, device = RejectionSampler(state), mesh.device_type
    for case in range(8):
        B = [9, 5, 2, 1][case % 4]
        slots, most = rng.permutation(9)[:B].tolist(), rng.integers(1, 5, B).tolist()
        counts = [n - 1 for n in most] if case < 4 else rng.integers(0, most).tolist()
        drafts = rng.integers(0, 11, (B, 3)).tolist()
        sharder = BatchSharder(state, owners=OWNERS[case % 3])
        plan_of = partial(sharder.plan, slots, positions=[5] * B, capacity=capacity)
        plain = plan_of([n + 1 for n in counts])
        plan = plan_of(most, budget=sum(counts))
        plan = plan.admit(torch.tensor(counts, dtype=torch.int64, device=device))
        rows = torch.randn(plain.num_hidden_rows, 11, generator=torch.Generator().manual_seed(case))
        assert plan.num_hidden_rows == B + sum(counts)
        if exchange != "batch":
            assert plan.num_rows == B + sum(counts)
        outputs = [
            verifier(shard_vocab(p.select(rows.to(device)), mesh), p, drafts) for p in (plain, plan)
        ]
        for name, x in vars(outputs[0]).items():
            for key, tensor in vars(x).items() if name == "logprobs" else [(name, x)]:
                other = getattr(outputs[1].logprobs if name == "logprobs" else outputs[1], key)
                if not torch.equal(tensor, other):
                    found.append(f"{case}: {key}")
        if plan.capacity == plain.capacity:
            found += [
                f"{case}: {name}"
                for name in SAME_INDICES
                if not torch.equal(getattr(plan, name), getattr(plain, name))
            ]
    return found


SAME_INDICES = (
    *("logits_indices", "local_cu_num_logits", "row_requests", "row_slots"),
    *("row_offsets", "row_draft_rows", "row_draft_steps"),
)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_same_as_planned(ranks, exchange):
    """Catches what is told of another row, and rows listed otherwise than the host lists them."""
    for capacity in (None, 40) if exchange == "batch" else (None,):
        assert ranks.run(same_as_planned, exchange, capacity) == [[]] * ranks.size


def clamped(mesh, exchange: str, buckets: list[int]) -> list[tuple[list[int], list[list[int]]]]:
    """Counts that a plan makes of any, and the (request, offset) pairs of its hidden rows."""
    state = SamplingState(
        mesh, vocab_size=5, max_num_reqs=4, num_speculative_tokens=3, exchange=exchange, seed=0
    )
    for slot in range(4):
        state.add(slot, SamplingParams())
    sharder, device, found = BatchSharder(state, buckets=buckets), mesh.device_type, []
    for budget, given in CLAMPED:
        plan = sharder.plan(range(4), [4, 1, 3, 4], budget=budget)
        padding = len(plan.batch_slots) - 4  # which asks for drafts as well
        plan = plan.admit(torch.tensor(given + [3] * padding, device=device))
        assert plan.num_hidden_rows == (plan.num_rows if buckets else 4 + min(budget, 8))
        assert plan.counts is not None
        counts = plan.counts.tolist()
        assert counts[4:] == [0] * padding
        rows = torch.stack([plan.hidden_requests, plan.hidden_offsets], 1).tolist()
        ends = np.cumsum([n + 1 for n in counts[:4]]).tolist()
        assert plan.hidden_starts.tolist() == [0, *ends, *ends[-1:] * padding]
        found.append((counts[:4], rows))
        logits = shard_vocab(plan.select(torch.zeros(len(rows), 5, device=device)), mesh)
        RejectionSampler(state)(logits, plan, [[1] * 3] * (4 + padding))
    return found


CLAMPED = [
    # Budget, counts
    (4, [2, 0, 1, 1]),
    (4, [99, 99, 99, 99]),
    (2, [-(2**62), 5, 1, 3]),
    (0, [3, 3, 3, 3]),
    (10**9, [2**62, 2**62, -1, 3]),
    (8, [3, 0, 2, 3]),
]
CLAMPED_TO = [[2, 0, 1, 1], [3, 0, 1, 0], [0, 0, 1, 1], [0] * 4, [3, 0, 0, 3], [3, 0, 2, 3]]


@pytest.mark.parametrize("buckets", [[], [1, 3, 16]], ids=["tight", "padded"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_counts_are_clamped(ranks, exchange, buckets):
    """Catches counts that are trusted: more rows than there is room for, or rows of padding."""
    for found in ranks.run(clamped, exchange, buckets):
        assert [counts for counts, _ in found] == CLAMPED_TO
        for counts, rows in found:
            real = [[b, j] for b, n in enumerate(counts) for j in range(n + 1)]
            assert rows == real + [[0, 0]] * (len(rows) - len(real))


def packed_sequences(mesh) -> list[list[list[int]]]:
    """Tokens of a step whose hidden rows lie where `query_start_loc` says, and of its twin."""
    state = SamplingState(mesh, vocab_size=7, max_num_reqs=3, num_speculative_tokens=2, seed=0)
    for slot in range(3):
        state.add(slot, SamplingParams(seed=slot))
    sharder, verifier = BatchSharder(state), RejectionSampler(state)
    rows = torch.randn(14, 7, generator=torch.Generator().manual_seed(0)).to(mesh.device_type)
    starts, drafts = [0, 5, 8, 14], [[1, 2], [3, 4], [5, 6]]
    plan = sharder.plan([0, 1, 2], [3, 2, 3], query_start_loc=starts, budget=2, positions=[0] * 3)
    plan = plan.admit(torch.tensor([0, 1, 1], device=mesh.device_type))
    found = [verifier(shard_vocab(plan.select(rows), mesh), plan, drafts).token_ids.tolist()]
    taken = rows[torch.tensor([2, 6, 7, 11, 12], device=rows.device)]
    plan = sharder.plan([0, 1, 2], [1, 2, 2], positions=[0] * 3)
    found.append(verifier(shard_vocab(plan.select(taken), mesh), plan, drafts).token_ids.tolist())
    return found


@worlds(*FEW_WORLDS)
def test_packed_sequences(ranks):
    """Catches hidden rows of packed sequences that are taken to be packed by admitted drafts."""
    for first, second in ranks.run(packed_sequences):
        assert first == second


# --- what ranks say to each other, and what a plan says of itself


def traced(mesh, exchange: str) -> list[tuple]:
    """(promised, traced, promised bytes, rows) of steps under a budget."""
    state = SamplingState(
        mesh, vocab_size=13, max_num_reqs=7, num_speculative_tokens=3, exchange=exchange, seed=0
    )
    for slot in range(7):
        state.add(slot, SamplingParams(top_p=0.9))
    verifier, sharder, found = RejectionSampler(state), BatchSharder(state), []
    for budget in (0, 1, 6, 21, 50):
        plan = sharder.plan(range(7), [4] * 7, budget=budget)
        drafts = torch.ones((7, 3), dtype=torch.int64, device=mesh.device_type)
        with CollectiveTrace() as trace:
            plan = plan.admit(plan.best_first(drafts * 0.5, drafts))
            hidden = torch.zeros(len(plan.hidden_requests), 13, device=mesh.device_type)
            logits = shard_vocab(plan.select(hidden), mesh)
        assert not trace.calls
        with CollectiveTrace() as trace:
            verifier(logits, plan, drafts)
        cost = plan.cost()
        explained = plan.explain().as_json()
        assert explained["rows"] == 7 + min(budget, 21)
        own = explained["exchanges"][exchange]
        assert (own["wire_bytes"], own["num_rows"]) == (cost.wire_bytes, plan.num_rows)
        assert tuple(own["collectives"]) == cost.collectives
        assert "padding" in str(plan.explain())
        found.append((cost.collectives, trace.calls, cost.wire_bytes, plan.num_rows))
    return found


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_collectives(ranks, exchange):
    """Catches talk about who is admitted, rows beyond the budget, and a cost that counts them."""
    first, *others = ranks.run(traced, exchange)
    assert all(other == first for other in others)
    requests = -(-7 // ranks.size)
    for budget, (promised, calls, wire_bytes, rows) in zip((0, 1, 6, 21, 50), first, strict=True):
        assert tuple(KINDS[name] for name, *_ in calls) == promised
        assert wire_bytes == round(sum(sent_bytes(call, ranks.size) for call in calls))
        if exchange == "batch":
            assert rows == ranks.size * (requests + min(budget, 3 * requests))
            assert ranks.size == 1 or len(promised) == 2
        else:
            assert rows == 7 + min(budget, 21)


# --- in graphs


class Loop:
    """Drafts, admits and verifies in one function of two plans, or one after another."""

    V, K, SLOTS = 13, 3, 6

    def __init__(self, mesh, exchange: str, method: str) -> None:
        self.mesh = mesh
        self.state = SamplingState(
            mesh,
            vocab_size=self.V,
            max_num_reqs=self.SLOTS,
            num_speculative_tokens=self.K,
            exchange=exchange,
            seed=3,
        )
        generator = torch.Generator().manual_seed(1)
        shape = (self.V + 1, self.V)  # after no id, and after each
        tables = (torch.randn(shape, generator=generator) for _ in range(2))
        self.target, self.draft = (table.to(mesh.device_type) for table in tables)
        self.sharder = BatchSharder(self.state)
        self.drafter = DraftSampler(self.state)
        self.verifier = RejectionSampler(self.state, method=method)

    def draw(self, plan: ShardPlan, last_B: torch.Tensor) -> torch.Tensor:
        """[B, K + 1] the last token and the drafts after it, as rows of the tables."""
        text = [last_B]
        for step in range(self.K):
            logits = shard_vocab(plan.select(self.draft[text[-1]]), self.mesh)
            text.append(1 + self.drafter(logits, plan, step=step))
        return torch.stack(text, 1)

    def verify(
        self, plan: ShardPlan, text_BJ: torch.Tensor, words_BJ1: torch.Tensor
    ) -> dict[str, Any]:
        drafts = text_BJ[:, 1:] - 1
        p, q = self.target.softmax(1), self.draft.softmax(1)
        confidences = torch.minimum(p, q).sum(1)[text_BJ[:, :-1]]
        plan = plan.admit(plan.best_first(confidences, drafts))
        hidden = self.target[text_BJ[plan.hidden_requests, plan.hidden_offsets]]
        logits = shard_vocab(plan.select(hidden), self.mesh)
        mask = TokenBitmask(bitmask=words_BJ1.flatten(0, 1))
        output = self.verifier(logits, plan, drafts, mask=mask)
        return {"output": output, "counts": plan.counts, "drafts": drafts}

    def both(
        self, plans: tuple[ShardPlan, ShardPlan], last_B: torch.Tensor, words_BJ1: torch.Tensor
    ) -> dict[str, Any]:
        draft_plan, plan = plans
        return self.verify(plan, self.draw(draft_plan, last_B), words_BJ1)


def shown(result: dict[str, Any]) -> dict[str, Any]:
    output = result["output"]
    told = {} if output.logprobs is None else vars(output.logprobs)
    tensors = {**vars(output), **told, "counts": result["counts"], "drafts": result["drafts"]}
    return {n: x.tolist() for n, x in tensors.items() if isinstance(x, torch.Tensor)}


def life(mesh, exchange: str, method: str, steps: int) -> tuple[int, int]:
    """Compare an engine whose steps are graphs with one that knows what it drafted when it plans.

    Returns how many drafts were admitted in all, and how many graphs there were.
    """
    plain, fused = (Loop(mesh, exchange, method) for _ in range(2))
    graphed = GraphedStep(fused.both, fused.state, capacities=[2, 5, 24])
    rng, live, total = np.random.default_rng(5), set[int](), 0
    for _ in range(steps):
        for slot in rng.permutation(plain.SLOTS)[:2].tolist():
            if slot in live and rng.random() < 0.3:
                live.discard(slot)
                for loop in (plain, fused):
                    loop.state.remove(slot)
            elif slot not in live:
                live.add(slot)
                told: dict[str, Any] = {"logprobs": 2} if rng.random() < 0.2 else {}
                if rng.random() < 0.3:
                    told["frequency_penalty"] = 0.5
                temperature = float(rng.choice([0.0, 0.7, 1.0]))
                params = SamplingParams(temperature=temperature, **told)
                for loop in (plain, fused):
                    loop.state.add(slot, params, position=7)
        slots = rng.permutation(sorted(live)).tolist()[: int(rng.integers(plain.SLOTS + 1))]
        B, budget = len(slots), int(rng.choice([0, 2, 5, 30]))
        rows = rng.integers(1, plain.K + 2, B).tolist()
        last = torch.tensor(rng.integers(0, plain.V + 1, B)).to(mesh.device_type)
        words = rng.integers(0, 2**plain.V, (B, plain.K + 1, 1)) | rng.integers(0, 2**plain.V)
        bitmask = torch.tensor(words, dtype=torch.int32).to(mesh.device_type)

        text = plain.draw(plain.sharder.plan(slots), last)
        wanted = plain.verify(plain.sharder.plan(slots, rows, budget=budget), text, bitmask)
        draft_plan = graphed.plan(slots)
        plans = (draft_plan, graphed.plan(slots, rows, budget=budget, after=draft_plan))
        got = graphed(plans, last, bitmask)
        assert shown(got) == shown(wanted), slots
        at = [loop.state.positions[slots].tolist() for loop in (plain, fused)]
        assert at[0] == at[1]
        total += int(wanted["counts"].sum())
    made = graphed.num_graphs
    graphed.close()
    return total, made


@worlds(*FEW_WORLDS)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("exchange", "method"),
    [
        ("batch", "block"),
        pytest.param("vocab", "standard", marks=pytest.mark.slow),
        pytest.param("replicate", "block", marks=pytest.mark.slow),
    ],
)
def test_a_life_in_graphs(ranks, exchange, method):
    """Catches a budget, counts, rows or kept drafts that a graph has frozen, and padding admitted.

    Or a mask of other rows. Drafts, admission and verification are one function; on CPUs it runs
    padded, without graphs.
    """
    steps = 300 if ranks.device_type == "cuda" else 12
    results = ranks.run(life, exchange, method, steps, timeout=280)
    assert results == [results[0]] * ranks.size
    total, graphs = results[0]
    assert total > steps
    assert (graphs > 5) == (ranks.device_type == "cuda")


# --- what is refused


def refusals(mesh) -> tuple[dict[str, str], list[int]]:
    """What is said to wrong plans and counts, each followed by a good step."""
    state = SamplingState(mesh, vocab_size=7, max_num_reqs=3, num_speculative_tokens=2, seed=0)
    for slot in range(3):
        state.add(slot, SamplingParams())
    other = SamplingState(mesh, vocab_size=7, max_num_reqs=3, num_speculative_tokens=2, seed=0)
    other.add(0, SamplingParams())
    chosen = SamplingState(mesh, vocab_size=7, max_num_reqs=3, seed=0)
    sharder, verifier, device = BatchSharder(state), RejectionSampler(state), mesh.device_type
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    drafts, sure = counts[:, None].expand(3, 2), torch.ones(3, 2, device=device)
    hidden = torch.zeros(9, 7, device=device)
    plain, plan = sharder.plan([0, 1, 2], [3] * 3), sharder.plan([0, 1, 2], [3] * 3, budget=2)
    whole, late = plan.admit(counts), sharder.plan([0, 1, 2], [3] * 3, after=plain)
    logits = shard_vocab(whole.select(hidden[: whole.num_hidden_rows]), mesh)
    step = GraphedStep(lambda plans, *rows: None, state, capacities=[9])
    padded = torch.zeros_like(step.plan([0]).batch_slots)
    calls: dict[str, Callable[[], object]] = {
        "budget -1": lambda: sharder.plan([0], budget=-1),
        "budget 1.5": lambda: sharder.plan([0], budget=1.5),  # type: ignore[arg-type]
        "budget without drafts": lambda: BatchSharder(chosen).plan([], budget=0),
        "no budget, counts": lambda: plain.admit(counts),
        "no budget, confidences": lambda: plain.best_first(sure, drafts),
        "counts on the host": lambda: plan.admit([0, 0, 0]),  # type: ignore[arg-type]
        "counts float": lambda: plan.admit(counts.float()),
        "counts of two": lambda: plan.admit(counts[:2]),
        "confidences of two": lambda: plan.best_first(sure[:2], drafts),
        "confidences half": lambda: plan.best_first(sure.half(), drafts),
        "drafts as lists": lambda: plan.best_first(sure, [[0]] * 3),  # type: ignore[arg-type]
        "select": lambda: plan.select(hidden),
        "select all rows": lambda: whole.select(hidden),
        "hidden rows": lambda: plan.hidden_requests,
        "no budget, hidden rows": lambda: sharder.plan([0], exchange="vocab").hidden_offsets,
        "no budget, hidden starts": lambda: plain.hidden_starts,
        "verify": lambda: verifier(logits, plan, drafts),
        "sample": lambda: Sampler(state)(logits, whole),
        "after nothing": lambda: sharder.plan([0], after=3),  # type: ignore[arg-type]
        "after another": lambda: sharder.plan([0], after=BatchSharder(other).plan([0])),
        "after, elsewhere": lambda: sharder.plan(
            [0], exchange="vocab", after=sharder.plan([0], exchange="batch")
        ),
        "never drafted": lambda: verifier(shard_vocab(late.select(hidden), mesh), late, drafts),
        "plans of others": lambda: step((step.plan([0]), step.plan([1]))),
        "admitted before": lambda: step(step.plan([0], [3], budget=1).admit(padded)),
        "no plans": lambda: step(()),
        "not a plan": lambda: step((plan, 3)),  # type: ignore[arg-type]
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "passed"
        except ValueError as refused:
            said[name] = str(refused).replace(str(state.device), mesh.device_type)
    good = plan.admit(plan.best_first(sure, drafts))
    logits = shard_vocab(good.select(hidden[: good.num_hidden_rows]), mesh)
    return said, verifier(logits, good, drafts).num_sampled.tolist()


REFUSED = {
    "budget -1": "budget must be an integer in [0, 2**63), got -1",
    "budget 1.5": "budget must be an integer",
    "budget without drafts": "budget must be None without speculative tokens, got 0",
    "no budget, counts": "plan must be made with a budget to admit drafts, got None",
    "no budget, confidences": "plan must be made with a budget to admit drafts, got None",
    "counts on the host": "counts must be a plain tensor, got list",
    "counts float": "counts must be int64 of shape [3]",
    "counts of two": "counts must be int64 of shape [3]",
    "confidences of two": "confidences must be float32 or float64 of shape [3, 2]",
    "confidences half": "got torch.float16 of shape [3, 2]",
    "drafts as lists": "draft_token_ids must be a plain tensor, got list",
    "select": "plan must be given its drafts by plan.admit",
    "select all rows": "hidden must have shape [N, H] or [N, K, H] with N = 5",
    "hidden rows": "plan must be given its drafts by plan.admit",
    "no budget, hidden rows": "plan must be made with a budget to admit drafts, got None",
    "no budget, hidden starts": "plan must be made with a budget to admit drafts, got None",
    "verify": "plan must be given its drafts by plan.admit, since it has a budget of 2",
    "sample": "plan must have at most 1 rows a request for this sampler, got 3",
    "after nothing": "after must be a ShardPlan, got int",
    "after another": "plan must be made for this sampler's state",
    "after, elsewhere": 'exchange must be "batch", that of the plan that comes before it, got "voc',
    "never drafted": "plan must be made after the drafts of slot 0 were drawn: none are kept",
    "plans of others": "plan[1] must be of the slots [0], padded to",
    "admitted before": "plan[0] must be given its drafts within fn",
    "no plans": "plan must be a ShardPlan or some of them, got ()",
    "not a plan": "plan must be a ShardPlan, got int",
}


@worlds("cpu:4", "cuda:2")
def test_refusals(ranks):
    """Catches a budget that is ignored, and wrong arguments that reach a collective."""
    results = ranks.run(refusals)
    assert results == [results[0]] * ranks.size
    said, sampled = results[0]
    for name, wanted in REFUSED.items():
        assert wanted in said[name], (name, said[name])
    assert set(said) == set(REFUSED)
    assert min(sampled) >= 1

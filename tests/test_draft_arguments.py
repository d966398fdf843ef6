"""Wrong drafts and wrong steps with drafts are refused as any wrong argument is.

On every rank alike, before any collective, with a message that names argument, value and what was
expected; and then the next step works.
"""

from collections.abc import Callable
from typing import Any

import torch

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    SamplingParams,
    SamplingState,
)
from tests.batches import shard_vocab
from tests.pool import FEW_WORLDS, worlds
from tests.test_arguments import outcome
from tests.test_collectives import CollectiveTrace

SLOTS, K, V = 4, 3, 10


def only(ids: list[int], width: int = V) -> torch.Tensor:
    """[len(ids), width] logits of rows that leave one id each."""
    rows = torch.full((len(ids), width), -torch.inf)
    rows[range(len(ids)), ids] = 0.0
    return rows


class Bench:
    """A state with three requests, and good steps of it."""

    def __init__(self, mesh, exchange: str = "batch", debug: bool = False) -> None:
        self.mesh = mesh
        self.state = SamplingState(
            mesh,
            vocab_size=V,
            max_num_reqs=SLOTS,
            num_speculative_tokens=K,
            exchange=exchange,
            seed=0,
            debug=debug,
        )
        for slot in range(3):
            self.state.add(slot, SamplingParams())
        self.drafter, self.verifier = DraftSampler(self.state), RejectionSampler(self.state)
        self.sharder = BatchSharder(self.state)

    def plan(self, slots=(0, 1, 2), rows=None, **kwargs):
        return self.sharder.plan(slots, rows, **kwargs)

    def draft(self, plan=None, step: Any = 0, rows=None, drafter=None):
        plan = plan or self.plan()
        rows = only(list(plan.slots)) if rows is None else rows
        logits = shard_vocab(plan.select(rows.to(self.mesh.device_type)), self.mesh)
        return (drafter or self.drafter)(logits, plan, step=step)

    def logits(self, plan, width: int = V):
        ids = [
            slot + 3 * j
            for slot, k in zip(plan.slots, plan.num_logits, strict=True)
            for j in range(k)
        ]
        return shard_vocab(plan.select(only(ids, width).to(self.mesh.device_type)), self.mesh)

    def verify(self, drafts: Any = None, plan=None, width: int = V, **kwargs):
        plan = plan or self.plan(rows=[2] * 3)
        drafts = [[slot] for slot in plan.slots] if drafts is None else drafts
        return self.verifier(self.logits(plan, width), plan, drafts, **kwargs)

    def step(self) -> list[list[int]]:
        """Draft, whatever was kept before, and verify."""
        drafted = self.draft(step=0).tolist()
        return [drafted, *self.verify().token_ids.tolist()]


STEP = [[0, 1, 2], [0, 3, -1, -1], [1, 4, -1, -1], [2, 5, -1, -1]]


def nothing(bench: Any) -> None:
    """No preparation."""


def drawn(bench: Any) -> None:
    bench.draft()


def drawn_alone(bench: Any) -> Any:
    """A plan under which the second rank owns slot 1; and then drafts of it on the first."""
    before = bench.plan(rows=[2] * 3)
    bench.draft(bench.plan([1]))
    return before


def drawn_elsewhere(bench: Any) -> Any:
    """A plan to draft and one to verify after it; but another one drafted.

    By that one slots 0 and 1 have each other's owners, and the same blocks of their caches.
    """
    plan, other = bench.plan(), bench.plan([1, 0, 2])
    assert plan.draft_blocks[0] == other.draft_blocks[1]
    assert (plan.owners[0], other.owners[1]) == (0, 1)
    after = bench.plan(rows=[2] * 3, after=plan)
    bench.draft(other)
    return plan, after


def out_of_room(bench: Any) -> Any:
    """A plan that expects the first rank to have room, and drafts that fill it."""
    room = -(-SLOTS // bench.mesh.size())
    before = bench.plan([room])
    for slot in range(room):
        bench.draft(bench.plan([slot]))
    return before


def without_speculation(bench: Any) -> SamplingState:
    return SamplingState(bench.mesh, vocab_size=V, seed=0)


B = Any
NO: Any = "no"
Case = tuple[Callable[[B], object], Callable[[B, B], object], tuple[str, ...]]
CASES: dict[str, Case] = {
    # Each: what is done before, what is refused, and what its message must hold.
    "drafter: no speculation": (
        without_speculation,
        lambda b, state: DraftSampler(state),
        ("state", "num_speculative_tokens", ">= 1", "0"),
    ),
    "verifier: no speculation": (
        without_speculation,
        lambda b, state: RejectionSampler(state),
        ("state", "num_speculative_tokens", ">= 1", "0"),
    ),
    "verifier: method": (
        nothing,
        lambda b, _: RejectionSampler(b.state, method="tree"),
        ("method", "'tree'", "'block'"),
    ),
    "step below 0": (nothing, lambda b, _: b.draft(step=-1), ("step", "-1", "[0, 2]")),
    "step of K": (nothing, lambda b, _: b.draft(step=3), ("step", "3", "[0, 2]")),
    "step fraction": (nothing, lambda b, _: b.draft(step=0.5), ("step", "0.5", "integer")),
    "step before the first": (nothing, lambda b, _: b.draft(step=1), ("step", "1", "at most 0")),
    "step left out": (drawn, lambda b, _: b.draft(step=2), ("step", "2", "at most 1")),
    "greedy after drawn": (
        drawn,
        lambda b, _: b.draft(step=1, drafter=DraftSampler(b.state, greedy=True)),
        ("step", "1", "greedy"),
    ),
    "plain draft logits": (
        nothing,
        lambda b, _: b.drafter(only([0, 1, 2]), b.plan(), step=0),
        ("logits", "Tensor", "DTensor"),
    ),
    "too few draft logits": (
        nothing,
        lambda b, _: b.drafter(shard_vocab(only([0]), b.mesh), b.plan(exchange="vocab"), step=0),
        ("logits", "[3, V]", "[1, 10]"),
    ),
    "draft plan of more rows": (
        nothing,
        lambda b, _: b.drafter(b.logits(p := b.plan(rows=[2] * 3)), p, step=0),
        ("plan", "1 rows", "2"),
    ),
    "draft plan of another state": (
        lambda b: Bench(b.mesh).plan(),
        lambda b, plan: b.draft(plan),
        ("plan", "state"),
    ),
    "draft of a removed request": (
        lambda b: (b.plan(), b.state.remove(1))[0],
        lambda b, plan: (b.draft(plan), None)[1],
        ("slot 1", "no request"),
    ),
    "draft logits of another dtype": (
        drawn,
        lambda b, _: b.draft(rows=only([0, 1, 2]).bfloat16()),
        ("draft_logits", "float32", "bfloat16"),
    ),
    "draft under another exchange": (
        drawn,
        lambda b, _: b.draft(b.plan(exchange="vocab")),
        ("exchange", '"batch"', '"vocab"'),
    ),
    "verification under another exchange": (
        drawn,
        lambda b, _: b.verify(plan=b.plan(rows=[2] * 3, exchange="replicate")),
        ("exchange", '"batch"', '"replicate"'),
    ),
    "vocab: draft logits of another width": (
        drawn,
        lambda b, _: b.draft(step=1, rows=only([0, 1, 2], V + 8)),
        ("logits", "columns"),
    ),
    "vocab: target of another width": (
        drawn,
        lambda b, _: b.verify(width=V + 8),
        ("logits", "columns"),
    ),
    "verifier: no plan": (
        nothing,
        lambda b, _: b.verifier(b.logits(b.plan()), None, []),
        ("plan", "ShardPlan", "NoneType"),
    ),
    "drafter: no plan": (
        nothing,
        lambda b, _: b.drafter(b.logits(b.plan()), [0, 1, 2], step=0),
        ("plan", "ShardPlan", "list"),
    ),
    "drafter: greedy": (
        nothing,
        lambda b, _: DraftSampler(b.state, greedy=NO),
        ("greedy", "bool", "str"),
    ),
    "verifier: compile": (
        nothing,
        lambda b, _: RejectionSampler(b.state, compile=NO),
        ("compile", "bool", "str"),
    ),
    "drafts: bools": (
        nothing,
        lambda b, _: b.verify([[True], [1], [2]]),
        ("draft_token_ids", "integers", "True"),
    ),
    "drafts: too few": (nothing, lambda b, _: b.verify([[1]] * 2), ("draft_token_ids", "[3, 3]")),
    "drafts: too long": (
        nothing,
        lambda b, _: b.verify([[1], [1] * 4, []]),
        ("draft_token_ids", "[3, 3]"),
    ),
    "drafts: flat": (nothing, lambda b, _: b.verify([1, 2, 3]), ("draft_token_ids", "[1, 2, 3]")),
    "drafts: text": (nothing, lambda b, _: b.verify("abc"), ("draft_token_ids", "'abc'")),
    "drafts: None": (
        nothing,
        lambda b, _: b.verifier(b.logits(p := b.plan()), p, None),
        ("draft_token_ids", "NoneType"),
    ),
    "drafts: fractions": (
        nothing,
        lambda b, _: b.verify(torch.ones(3, 3)),
        ("draft_token_ids", "int64", "float32"),
    ),
    "drafts: too wide": (
        nothing,
        lambda b, _: b.verify(torch.ones(3, 4, dtype=torch.int64)),
        ("draft_token_ids", "[3, 3]", "[3, 4]"),
    ),
    "drafts: a DTensor": (
        nothing,
        lambda b, _: b.verify(shard_vocab(torch.ones(3, 3, dtype=torch.int64), b.mesh)),
        ("draft_token_ids", "plain", "DTensor"),
    ),
    "one_hot: too few": (
        nothing,
        lambda b, _: b.verify(one_hot=[True]),
        ("one_hot", "3 entries", "1"),
    ),
    "one_hot: a tensor": (
        nothing,
        lambda b, _: b.verify(one_hot=torch.ones(3, dtype=torch.bool)),
        ("one_hot", "sequence", "Tensor"),
    ),
    "one_hot: integers": (
        nothing,
        lambda b, _: b.verify(one_hot=[True, 1, True]),
        ("one_hot[1]", "bool", "1"),
    ),
    "one_hot: never drawn": (
        lambda b: b.draft(b.plan([0, 2])),
        lambda b, _: b.verify(one_hot=[False] * 3),
        ("one_hot[1]", "False", "slot 1"),
    ),
    "target: too few rows": (
        nothing,
        lambda b, _: b.verifier(b.logits(b.plan()), b.plan(rows=[2] * 3), [[0], [1], [2]]),
        ("logits", "one row for each"),
    ),
    "target: another state's plan": (
        lambda b: Bench(b.mesh).plan(rows=[2] * 3),
        lambda b, plan: b.verify(plan=plan),
        ("plan", "state"),
    ),
}
MANY = {
    # Of more than one rank.
    "plan older than drafts": (
        drawn_alone,
        lambda b, plan: b.verify(plan=plan),
        ("plan", "slot 1", "rank 0", "after"),
    ),
    "draft plan older than drafts": (
        lambda b: (b.plan(), b.draft(b.plan([1])))[0],
        lambda b, plan: b.draft(plan),
        ("plan", "slot 0", "rank 0", "after"),
    ),
    "plan of other owners": (
        drawn_elsewhere,
        lambda b, plans: b.verify(plan=plans[1]),
        ("plan", "slot 0", "by rank 1", "owner is rank 0", "after"),
    ),
    "draft plan of other owners": (
        drawn_elsewhere,
        lambda b, plans: b.draft(plans[0], 1),
        ("plan", "slot 0", "rank 0", "after"),
    ),
    "no room": (
        out_of_room,
        lambda b, plan: b.draft(plan),
        ("plan", "rank 0", "no room"),
    ),
}


def cases_for(size: int) -> dict[str, Case]:
    return CASES | MANY if size > 1 else CASES


def refusals(mesh) -> dict[str, tuple[str, list, str]]:
    """For each case: what it came to, collectives until then, and what a good step then does."""
    results = {}
    for name, (before, spoiled, _) in cases_for(mesh.size()).items():
        bench = Bench(mesh, "vocab" if name.startswith("vocab") else "batch")
        prepared = before(bench)
        with CollectiveTrace() as trace:
            raised = outcome(spoiled, bench, prepared)
        if name == "draft of a removed request":
            bench.state.add(1, SamplingParams())
        results[name] = (raised, trace.calls, outcome(bench.step))
    return results


@worlds(*FEW_WORLDS)
def test_refusals(ranks):
    """Catches silent acceptance, another exception, a vague message, a rank that goes on alone."""
    wrong = []
    for rank, results in enumerate(ranks.run(refusals)):
        for name, (_, _, parts) in cases_for(ranks.size).items():
            raised, calls, next_step = results[name]
            if calls or not all(part in raised for part in ("ValueError: ", *parts)):
                wrong.append(f"rank {rank}, {name}: {raised} after {calls}")
            if next_step != f"returned {STEP}":
                wrong.append(f"rank {rank}, {name}, next step: {next_step}")
    assert not wrong, "\n".join(wrong)


def accepted_forms(mesh) -> list[list[list[int]]]:
    """Good steps that look wrong: drafts in every form, claims that do not matter."""
    forms = [
        [[0], [1], [2]],
        ([0], (1, -1, -1), torch.tensor([2])),
        torch.tensor([[0, -1, -1], [1, 9, 9], [2, -1, -1]]),
        torch.tensor([[0, -1, -1], [1, 9, 9], [2, -1, -1]], dtype=torch.int32),
    ]
    results = [Bench(mesh).verify(form).token_ids.tolist() for form in forms]
    bench = Bench(mesh)
    bench.draft()
    results.append(bench.verify(one_hot=[True] * 3).token_ids.tolist())
    bench = Bench(mesh)
    bench.draft()
    bench.draft(step=0, drafter=DraftSampler(bench.state, greedy=True))  # begins anew
    results.append(bench.verify(one_hot=[True] * 3).token_ids.tolist())
    # Rows of one place each have no draft that could be claimed to be drawn.
    plan = bench.plan()
    alone = bench.verify([[]] * 3, plan, one_hot=[False] * 3).token_ids.tolist()
    assert alone == [[slot, -1, -1, -1] for slot in range(3)]
    # Nothing at all.
    plan = bench.plan([])
    assert bench.verify([], plan).token_ids.shape == (0, K + 1)
    assert bench.draft(plan).shape == (0,)
    return results


@worlds(*FEW_WORLDS)
def test_accepted_forms(ranks):
    """Catches refusals of what is documented: shorter lists, int32, no requests."""
    for results in ranks.run(accepted_forms):
        assert results == [STEP[1:]] * 6


# --- debug mode

ODD: dict[str, tuple[Callable[[B, bool], object], str, bool]] = {
    # Each: what one rank does otherwise, the argument named, whether it would be refused alone.
    "drafts": (lambda b, odd: b.verify([[0], [1], [int(odd)]]), "draft_token_ids", False),
    "too few drafts": (lambda b, odd: b.verify([[0]] * (3 - odd)), "draft_token_ids", True),
    "one_hot": (lambda b, odd: b.verify(one_hot=[True, True, odd]), "one_hot", False),
    "step": (lambda b, odd: b.draft(step=int(odd)), "step", False),
    "step out of range": (lambda b, odd: b.draft(step=3 * odd), "step", True),
    "greedy": (
        lambda b, odd: b.draft(drafter=DraftSampler(b.state, greedy=odd)),
        "greedy",
        False,
    ),
    "forgotten drafts": (
        lambda b, odd: (b.state.drafts.forget([1] * odd), b.plan(rows=[2] * 3)),
        "requests",
        False,
    ),
}


def disagreements(mesh) -> dict[str, tuple[str, str]]:
    results = {}
    odd = mesh.get_local_rank() == mesh.size() - 1
    for name, (call, _, _) in ODD.items():
        bench = Bench(mesh, debug=True)
        bench.draft()
        raised = outcome(call, bench, odd)
        bench.state.drafts.forget(range(SLOTS))
        results[name] = (raised, outcome(bench.step))
    return results


@worlds("cpu:4", "cuda:2")
def test_debug_mode(ranks):
    """Catches drafts that differ on one rank, or are refused there: all ranks raise and name it."""
    last = ranks.size - 1
    for rank, results in enumerate(ranks.run(disagreements)):
        for name, (raised, next_step) in results.items():
            _, argument, refused_alone = ODD[name]
            parts = [argument, f"on rank {last} of"]
            if refused_alone:
                parts = parts[:1] if rank == last else ["arguments were refused", parts[1]]
            assert all(part in raised for part in ("ValueError: ", *parts)), (name, raised)
            assert next_step == f"returned {STEP}", (name, next_step)

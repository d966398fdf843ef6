"""Wrong heads, logits and tokens are refused on every rank alike; then the next step works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    SamplingParams,
    SamplingState,
    vocab_sharded,
)
from dtensor_sample.draft.sequential import MarkovHead, SequentialDraftSampler
from tests.batches import shard_vocab
from tests.pool import FEW_WORLDS, worlds
from tests.test_arguments import outcome
from tests.test_collectives import CollectiveTrace

V, K, R, WIDTH = 10, 3, 2, 4


class Bench:
    """A state with four requests, and good steps of it."""

    def __init__(self, mesh, exchange: str = "batch", debug: bool = False, **kwargs) -> None:
        self.mesh, self.device = mesh, mesh.device_type
        self.state = SamplingState(
            mesh,
            vocab_size=V,
            max_num_reqs=4,
            num_speculative_tokens=K,
            exchange=exchange,
            seed=0,
            debug=debug,
        )
        for slot in range(4):
            self.state.add(slot, SamplingParams(temperature=0.0))
        self.sharder = BatchSharder(self.state)
        self.told = SequentialDraftSampler(self.state, self.head(), loop="sharded", **kwargs)
        self.untold = SequentialDraftSampler(self.state, self.head(None), loop="sharded")

    def head(self, width: int | None = WIDTH, *, columns: int = V, **kwargs) -> MarkovHead:
        w1 = torch.zeros(V, R, device=self.device)
        w2 = torch.zeros(R, columns, device=self.device)
        weight = None if width is None else torch.zeros(width + R)
        return MarkovHead(w1, w2, confidence=weight, **kwargs)

    def built(self, head: Any = None, **kwargs: Any) -> SequentialDraftSampler:
        return SequentialDraftSampler(self.state, head or self.head(), **kwargs)

    def logits(self, plan, *shape: int, dtype=torch.float32):
        rows = torch.zeros(shape or (len(plan.slots), K, V), dtype=dtype, device=self.device)
        rows[..., 7] = 1
        return shard_vocab(plan.select(rows) if not shape else rows, self.mesh)

    def draft(self, last: Any = (1, 2, 3, 4), *, hidden: Any = None, logits=None, plan=None):
        plan = plan or self.sharder.plan(range(4))
        logits = self.logits(plan) if logits is None else logits
        return self.told(logits, plan, last, self.hidden(plan) if hidden is None else hidden)

    def hidden(self, plan, *shape: int) -> torch.Tensor:
        return torch.zeros(shape or (plan.num_rows, K, WIDTH), device=self.device)

    def step(self) -> list:
        tokens, told = self.draft()
        return [tokens.tolist(), told.tolist()]


def other_state(bench: Bench, **kwargs: Any) -> SamplingState:
    return SamplingState(bench.mesh, **{"vocab_size": V, "seed": 0, **kwargs})


def sharded_w2(bench: Bench, columns: int = V) -> MarkovHead:
    w2 = shard_vocab(torch.zeros(R, columns), bench.mesh)
    return MarkovHead(torch.zeros(V, R, device=bench.device), w2)


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


ZEROS = torch.zeros
GOOD = [[[7, 7, 7]] * 4, [[0.5, 0.5, 0.5]] * 4]
CASES: dict[str, tuple[Callable[[Bench], object], tuple[str, ...]]] = {
    # What is refused, and what its message must hold.
    "w1 list": (lambda b: MarkovHead([1], ZEROS(2, 3)), ("w1", "Tensor", "list")),  # type: ignore[arg-type]
    "w1 dims": (lambda b: MarkovHead(ZEROS(3), ZEROS(2, 3)), ("w1", "2 dims", "[3]")),
    "w1 integers": (
        lambda b: MarkovHead(ZEROS(3, 2).long(), ZEROS(2, 3)),
        ("w1", "floating", "int64"),
    ),
    "w1 wide": (
        lambda b: MarkovHead(ZEROS(3, 1025), ZEROS(1025, 3)),
        ("w1.shape[1]", "[1, 1024]", "1025"),
    ),
    "w1 NaN": (
        lambda b: MarkovHead(ZEROS(3, 2) / 0, ZEROS(2, 3)),
        ("w1", "finite", "NaN"),
    ),
    "w2 rows": (lambda b: MarkovHead(ZEROS(3, 2), ZEROS(3, 3)), ("w2", "2 rows", "[3, 3]")),
    "w2 placement": (
        lambda b: MarkovHead(ZEROS(3, 2), shard_vocab(ZEROS(2, 3), b.mesh, dim=0)),
        ("w2", "Shard(1)", "Shard(dim=0)"),
    ),
    "confidence length": (
        lambda b: MarkovHead(ZEROS(3, 2), ZEROS(2, 3), confidence=ZEROS(2)),
        ("len(confidence)", "3", "2"),
    ),
    "confidence bias": (
        lambda b: b.head(confidence_bias=float("nan")),
        ("confidence_bias", "number", "nan"),
    ),
    "state without drafts": (
        lambda b: SequentialDraftSampler(other_state(b), b.head()),
        ("state", "num_speculative_tokens", ">= 1", "0"),
    ),
    "head": (lambda b: b.built("head"), ("head", "MarkovHead", "str")),
    "head of other ids": (
        lambda b: SequentialDraftSampler(
            other_state(b, vocab_size=11, num_speculative_tokens=1), b.head()
        ),
        ("head", "11 rows", "got 10"),
    ),
    "head of fewer ids": (
        lambda b: b.built(b.head(columns=9)),
        ("head", "10 columns", "draft_to_target", "9"),
    ),
    "candidates": (lambda b: b.built(candidates=-1), ("candidates", ">= 0", "-1")),
    "loop": (lambda b: b.built(loop="fused"), ("loop", "'fused'", "'sharded'")),
    "full logits": (
        lambda b: b.built(loop="sharded", full_logits=True),
        ("loop", "full_logits", "sharded"),
    ),
    "map of another length": (
        lambda b: b.built(draft_to_target=ids(1, 2)),
        ("draft_to_target", "[10]", "[2]"),
    ),
    "map of a dtype": (
        lambda b: b.built(draft_to_target=torch.arange(10).int()),
        ("draft_to_target", "int64", "int32"),
    ),
    "map with a double": (
        lambda b: b.built(b.head(columns=2), draft_to_target=ids(1, 1)),
        ("draft_to_target", "distinct", "[0, 9]"),
    ),
    "map beyond": (
        lambda b: b.built(b.head(columns=2), draft_to_target=ids(1, 10)),
        ("draft_to_target", "distinct", "[0, 9]"),
    ),
    "w2 of owners": (
        lambda b: b.built(sharded_w2(b)),
        ("w2", "plain", '"batch"', "DTensor"),
    ),
    "logits of one place": (
        lambda b: b.draft(logits=b.logits(None, 4, V)),
        ("logits", ", 3, V]", f", {V}]"),
    ),
    "logits of more places": (
        lambda b: b.draft(logits=b.logits(None, b.sharder.plan(range(4)).num_rows, K + 1, V)),
        ("logits", ", 3, V]", f", 4, {V}]"),
    ),
    "plain logits": (lambda b: b.draft(logits=ZEROS(4, K, V)), ("logits", "DTensor", "Tensor")),
    "logits of fewer ids": (
        lambda b: b.draft(logits=b.logits(None, b.sharder.plan(range(4)).num_rows, K, V - 1)),
        ("vocab_size", "<= the last dim of logits, 9", "10"),
    ),
    "rows of a plan": (
        lambda b: b.draft(plan=b.sharder.plan(range(4), [2] * 4), logits=b.logits(None, 8, K, V)),
        ("1 rows a request", "2"),
    ),
    "plan": (lambda b: b.draft(plan="plan", logits=1, hidden=1), ("plan", "ShardPlan", "str")),
    "too few last tokens": (lambda b: b.draft([1, 2, 3]), ("last_token_ids", "4 entries", "3")),
    "last token beyond": (lambda b: b.draft([1, 2, 3, V]), ("last_token_ids[3]", "[0, 9]", "10")),
    "no last token": (lambda b: b.draft([1, -1, 3, 4]), ("last_token_ids[1]", "[0, 9]", "-1")),
    "last tokens, a DTensor": (
        lambda b: b.draft(
            shard_vocab(torch.zeros(1, 4, dtype=torch.int64, device=b.device), b.mesh)
        ),
        ("last_token_ids", "plain", "DTensor"),
    ),
    "last tokens, shape": (
        lambda b: b.draft(torch.zeros(3, dtype=torch.int64, device=b.device)),
        ("last_token_ids", "[4]", "[3]"),
    ),
    "last tokens, dtype": (
        lambda b: b.draft(torch.zeros(4, device=b.device)),
        ("last_token_ids", "int64", "float32"),
    ),
    "no hidden": (
        lambda b: b.told(b.logits(b.sharder.plan(range(4))), b.sharder.plan(range(4)), [1] * 4),
        ("hidden", "given", "confidences", "None"),
    ),
    "hidden for nothing": (
        lambda b: b.untold(
            b.logits(b.sharder.plan(range(4))), b.sharder.plan(range(4)), [1] * 4, ZEROS(1)
        ),
        ("hidden", "None", "confidences", "Tensor"),
    ),
    "hidden shape": (
        lambda b: b.draft(hidden=b.hidden(None, 4, K, WIDTH + 1)),
        ("hidden", f", 3, {WIDTH}]", f"[4, 3, {WIDTH + 1}]"),
    ),
    "hidden dtype": (
        lambda b: b.draft(hidden=b.hidden(b.sharder.plan(range(4))).long()),
        ("hidden", "float32", "int64"),
    ),
    "hidden of double precision": (
        lambda b: b.draft(hidden=b.hidden(b.sharder.plan(range(4))).double()),
        ("hidden", "float32", "float64"),
    ),
    "hidden elsewhere": (
        lambda b: b.draft(hidden=b.hidden(b.sharder.plan(range(4))).to("meta")),
        ("hidden", "on c", "on meta"),
    ),
    "sharded hidden": (
        lambda b: b.draft(hidden=shard_vocab(b.hidden(b.sharder.plan(range(4))), b.mesh)),
        ("hidden", "Replicate()", "Shard"),
    ),
}


def refusals(mesh) -> dict[str, tuple[str, list, str]]:
    """For each case: what it came to, collectives until then, and what a good step then does."""
    results, bench = {}, Bench(mesh)
    for name, (spoiled, _) in CASES.items():
        with CollectiveTrace() as trace:
            raised = outcome(spoiled, bench)
        # States compare their arguments when they are built.
        calls = [] if "state" in name or "other ids" in name else trace.calls
        results[name] = (raised, calls, outcome(bench.step))
    return results


@worlds(*FEW_WORLDS)
def test_refusals(ranks):
    """Catches silent acceptance, another exception, a vague message, a rank that goes on alone."""
    wrong = []
    for rank, results in enumerate(ranks.run(refusals)):
        for name, (raised, calls, after) in results.items():
            parts = CASES[name][1]
            if not raised.startswith("ValueError: ") or not all(part in raised for part in parts):
                wrong.append((rank, name, raised, parts))
            if calls or after != f"returned {GOOD}":
                wrong.append((rank, name, calls, after))
    assert wrong == []


def failing_redraft(mesh) -> list[int]:
    """Drafts kept of a request after a block, and after another that a processor let fail."""
    bench, kept = Bench(mesh), []

    def moody(values, rows):
        raise KeyError("not now")

    for slot in range(4):
        bench.state.remove(slot)
        bench.state.add(slot, SamplingParams())
    bench.draft(plan=bench.sharder.plan(range(4)))
    kept.append(bench.state.drafts.steps(1))
    bench.state.processors = (moody,)
    with pytest.raises(KeyError):
        bench.draft(plan=bench.sharder.plan(range(4)))
    kept.append(bench.state.drafts.steps(1))
    return kept


@worlds("cpu:2")
def test_a_block_that_fails_leaves_no_drafts(ranks):
    """Catches drafts that count as kept, though others were written over what they came from."""
    for before, after in ranks.run(failing_redraft):
        assert before > 0
        assert after == 0


def kept_drafts(mesh) -> list[str]:
    """Steps that do not fit to the drafts which are kept."""
    bench = Bench(mesh)
    bench.state.remove(0)
    bench.state.add(0, SamplingParams())
    said = []
    plan = bench.sharder.plan(range(4))
    bench.draft(plan=plan)
    said.append(outcome(lambda: bench.draft(logits=bench.logits(plan, dtype=torch.bfloat16))))
    vocab = bench.sharder.plan(range(4), exchange="vocab")
    said.append(outcome(lambda: bench.draft(plan=vocab)))
    bench.state.remove(1)
    bench.state.add(1, SamplingParams())
    said.append(outcome(lambda: bench.draft(plan=plan)))
    return said


@worlds(*FEW_WORLDS)
def test_what_is_kept_binds(ranks):
    """Catches rows of another dtype, exchange or request that are written into the cache."""
    for said in ranks.run(kept_drafts):
        assert "draft_logits must stay torch.float32, got torch.bfloat16" in said[0]
        assert 'exchange must be "batch", under which drafts are kept, got "vocab"' in said[1]
        assert "plan must be made after the request in slot 1 was added" in said[2]


def bound(mesh) -> list[str]:
    """What reduced vocabularies, fused loops and sharded factors say to exchanges."""
    said = []
    for exchange, kwargs in (
        ("vocab", {"full_logits": True}),
        ("vocab", {"draft_to_target": torch.arange(10, device=mesh.device_type)}),
    ):
        bench = Bench(mesh, exchange)
        said.append(outcome(lambda b=bench, k=kwargs: b.built(**k)))
    bench = Bench(mesh, "vocab")
    ids_D = torch.arange(10, device=mesh.device_type)
    said.append(outcome(lambda: bench.built(sharded_w2(bench), draft_to_target=ids_D)))
    wide = vocab_sharded(
        torch.zeros(4, K, -(-V // mesh.size()) + 1, device=mesh.device_type),
        mesh,
        vocab_size=V,
    )
    drafter = bench.built(sharded_w2(bench))
    said.append(outcome(lambda: drafter(wide, bench.sharder.plan(range(4)), [1] * 4)))
    one = torch.tensor(1.0, device=mesh.device_type)
    nothing = outcome(lambda: drafter(one, bench.sharder.plan(range(4)), [1] * 4))
    assert "ValueError: logits must be a DTensor, got Tensor" in nothing, nothing
    # "auto" goes where the factors lie, or may not go.
    for head, id_map in ((sharded_w2(bench), None), (bench.head(), ids_D)):
        state = other_state(bench, num_speculative_tokens=K)
        state.add(0, SamplingParams())
        SequentialDraftSampler(state, head, draft_to_target=id_map)
        said.append(BatchSharder(state).plan([0]).exchange.name)
        said.append(outcome(lambda s=state: BatchSharder(s).plan([0], exchange="vocab")))
    state = other_state(bench, num_speculative_tokens=K, exchange="vocab")
    DraftSampler(state)
    said.append(outcome(lambda: SequentialDraftSampler(state, bench.head(), full_logits=True)))
    return said


@worlds("cpu:2", "cuda:2")
def test_exchanges_that_do_not_fit(ranks):
    """Catches ids that a rank cannot have, and columns that are added to other columns."""
    for said in ranks.run(bound):
        assert 'exchange must not be "vocab": the drafter needs full logits' in said[0]
        assert 'exchange must not be "vocab": draft_to_target moves logits' in said[1]
        assert "w2 must be a plain tensor, got a DTensor: draft_to_target" in said[2]
        assert "w2 must have 6 columns a rank with padding, as draft_logits have, got 5" in said[3]
        assert said[4] == "vocab"
        assert said[5].startswith("returned ShardPlan")
        assert said[6] == "batch"
        assert "exchange must be one of ('batch', 'replicate'), got \"vocab\"" in said[7]
        assert "draft_to_target moves logits" in said[7]
        assert 'exchange must not be "vocab": the drafter needs full logits' in said[8]


def watched(mesh) -> list[str]:
    """Debug mode: tokens that differ on one rank, and a good step after it."""
    bench = Bench(mesh, debug=True)
    last = [1, 2, 3, 4 + (mesh.get_local_rank() == 1)]
    return [outcome(lambda: bench.draft(last)), outcome(bench.step)]


@worlds("cpu:2", "cuda:2")
def test_debug_mode_names_the_rank(ranks):
    for refused, after in ranks.run(watched):
        assert "last_token_ids" in refused
        assert "rank 1" in refused
        assert after == f"returned {GOOD}"


def after_no_ids(mesh) -> tuple[list, list]:
    """Blocks after tokens on the device, which are not looked at: some are no ids."""
    bench = Bench(mesh)
    w1 = torch.zeros(V, R, device=mesh.device_type)
    w1[0, 0], w1[-1, 1] = 9, 9
    w2 = torch.eye(R, V, device=mesh.device_type)
    weight = torch.zeros(WIDTH + R)
    head = MarkovHead(w1, w2, confidence=weight)
    drafter = SequentialDraftSampler(bench.state, head, loop="sharded")
    plan = bench.sharder.plan(range(4))
    last = torch.tensor([-1, 2**40, 0, V - 1], device=mesh.device_type)
    tokens, told = drafter(bench.logits(plan), plan, last, bench.hidden(plan))
    assert told is not None
    return tokens[:, :2].tolist(), told[:, 0].tolist()


@worlds("cpu:2", "cuda:2")
def test_nothing_is_drafted_after_no_id(ranks):
    """Catches the -1 of a row that failed, if a block follows as if it were token 0."""
    for tokens, told in ranks.run(after_no_ids):
        assert tokens[:2] == [[-1, -1]] * 2
        assert [row[0] for row in tokens[2:]] == [0, 1]
        assert told == [0, 0, 0.5, 0.5]

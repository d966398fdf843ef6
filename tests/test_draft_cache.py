"""The draft-logits cache over the life of an engine, against a dict, and its size."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
)
from tests import oracle
from tests.batches import OWNERS, library_weights, random_batch, random_params, shard_vocab
from tests.drafting import spoil
from tests.pool import FEW_WORLDS, worlds
from tests.speculation import rows_of

SLOTS, V, K, PADDING = 9, 11, 3, 2
EXCHANGES = ("batch", "vocab", "replicate")


@dataclass
class Live:
    """What an engine would know of the request in a slot."""

    params: SamplingParams
    position: int
    drafts: list[int] = field(default_factory=list)
    rows: list[oracle.Row] = field(default_factory=list)
    """What each draft was drawn from, where kept."""

    @property
    def where(self) -> dict[str, int]:
        assert self.params.seed is not None
        return {"seed": self.params.seed, "position": self.position}


class Script:
    """Random events of an engine, and what each must give. Requests, drafts, caches: one dict."""

    def __init__(self, seed: int, method: str, dtype: torch.dtype) -> None:
        self.rng, self.method, self.dtype = np.random.default_rng(seed), method, dtype
        self.live: dict[int, Live] = {}
        self.events: list[tuple] = []
        self.answers: list[Any] = []
        while len(self.live) < 5:
            self.add()

    def logits(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        seed = int(self.rng.integers(2**32))
        logits = random_batch(seed, rows, V, dtype=dtype, padding=PADDING).logits
        # Near to each other, so that drafts are accepted now and then.
        return (logits / 4).to(dtype) if self.rng.random() < 0.8 else logits

    def some(self, slots) -> list[int]:
        slots = list(slots)
        return self.rng.permutation(slots)[: self.rng.integers(len(slots) + 1)].tolist()

    def put(self, answer: Any, *event: Any) -> None:
        owners = str(self.rng.choice(OWNERS))
        self.events.append((event[0], owners, *event[1:]))
        self.answers.append(answer)

    def add(self) -> None:
        free = [slot for slot in range(SLOTS) if slot not in self.live]
        if free:
            slot, position = int(self.rng.choice(free)), int(self.rng.integers(100))
            params = random_params(self.rng, V, seeded=True)
            self.live[slot] = Live(params, position)
            self.put(None, "add", slot, params, position)

    def remove(self) -> None:
        for slot in self.some(self.live)[:2]:
            del self.live[slot]
            self.put(None, "remove", slot)

    def draft(self) -> None:
        step = int(self.rng.choice([0, 0, 1, 2]))
        able = [s for s, r in self.live.items() if step == 0 or step == len(r.drafts)]
        able = [s for s in able if step == 0 or self.live[s].rows or self.live[s].params.greedy]
        slots = self.some(able)
        logits = self.logits(len(slots), self.dtype)
        drawn = []
        for slot, row in zip(slots, logits, strict=True):
            request = self.live[slot]
            params = request.params
            [row] = rows_of(row[None], params, V)
            token = oracle.draft(row, params, step=step, **request.where)
            del request.drafts[step:], request.rows[step:]
            request.drafts.append(token)
            if not params.greedy:
                request.rows.append(row)
            drawn.append(token)
        self.put(drawn, "draft", slots, step, logits)

    def verify(self) -> None:
        slots = self.some(self.live)
        chosen, counts, targets, answers = [], [], [], []
        for slot in slots:
            request = self.live[slot]
            k = int(self.rng.integers(K + 1))
            ids = request.drafts[:k]
            # One-hot drafts where none were drawn; a draft too many where some were.
            ids += self.rng.integers(V, size=k - len(ids)).tolist()
            if k and self.rng.random() < 0.1:
                ids[int(self.rng.integers(k))] = -1
            target = self.logits(k + 1, torch.float32)
            draft_rows: list[oracle.Row | None] = list(request.rows[:k])
            known = list(ids)
            if draft_rows:
                known[len(draft_rows) :] = [-1] * (k - len(draft_rows))
            draft_rows += [None] * (k - len(draft_rows))
            params = request.params
            rows = rows_of(target, params, V)
            verified = oracle.verify(
                rows, known, draft_rows, params, method=self.method, **request.where
            )
            request.position += len(verified.tokens)
            request.drafts, request.rows = [], []
            chosen.append(ids + [-1] * int(self.rng.integers(K - k + 1)))
            counts.append(k + 1)
            targets.append(target)
            answers.append(verified.tokens + [-1] * (K + 1 - len(verified.tokens)))
        logits = torch.cat([torch.empty(0, V + PADDING), *targets])
        self.put(answers, "verify", slots, counts, chosen, logits)

    def sample(self) -> None:
        slots = self.some(self.live)[:2]
        logits = self.logits(len(slots), torch.float32)
        answers = []
        for slot, row in zip(slots, logits, strict=True):
            request = self.live[slot]
            params = request.params
            got = oracle.sample(
                row.numpy(),
                params,
                **request.where,
                vocab_size=V,
                largest=float(np.finfo(np.float32).max),
                weights=library_weights,
            )
            request.position += not got.failed
            request.drafts, request.rows = [], []
            answers.append([got.token] + [-1] * K)
        self.put(answers, "sample", slots, logits)


def kept_rows(state: SamplingState, slots: list[int]) -> list[int]:
    """Rows of the cache on this rank that hold drafts now."""
    cache, rank = state.drafts, state.axis.rank
    first = [
        (cache._kept[slot].block * K, cache.steps(slot))
        for slot in slots
        if cache.exchange != "batch" or cache._kept[slot].owner == rank
    ]
    return [row + step for row, steps in first for step in range(steps)]


def live(mesh, events: list[tuple], exchange: str, method: str) -> tuple[list[Any], int, set]:
    """What the events give, while rows of the cache without drafts are NaN, and its bytes.

    And the exchanges under which drafts were kept.
    """
    device = mesh.device_type
    state = SamplingState(
        mesh, vocab_size=V, max_num_reqs=SLOTS, num_speculative_tokens=K, exchange=exchange, seed=0
    )
    sharders = {owners: BatchSharder(state, owners=owners) for owners in OWNERS}
    drafter, verifier, sampler = (
        DraftSampler(state),
        RejectionSampler(state, method=method),
        Sampler(state),
    )
    results: list[Any] = []
    for kind, owners, *given in events:
        under = state.drafts.exchange
        # With "auto" drafts move to another exchange whenever there are none.
        moved = ("batch", "vocab")[len(results) % 2] if exchange == "auto" and not under else None
        for name in [under] if under else EXCHANGES:
            spoil(state, name, kept_rows(state, list(state.drafts._kept)))
        result = None
        if kind == "add":
            slot, params, position = given
            state.add(slot, params, position=position)
        elif kind == "remove":
            state.remove(*given)
        else:
            slots, *given, logits = given
            num_logits = given[0] if kind == "verify" else None
            plan = sharders[owners].plan(slots, num_logits, exchange=moved)
            rows = shard_vocab(plan.select(logits.to(device)), mesh)
            if kind == "draft":
                result = drafter(rows, plan, step=given[0]).tolist()
            elif kind == "sample":
                result = sampler(rows, plan).token_ids.tolist()
            else:
                result = verifier(rows, plan, given[1]).token_ids.tolist()
        results.append(result)
    kept = {name for name in EXCHANGES if state.drafts.logits(name) is not None}
    return results, state.drafts.bytes, kept


@lru_cache
def script(seed: int, method: str, dtype: torch.dtype) -> Script:
    made = Script(seed, method, dtype)
    for _ in range(60):
        kinds = [made.draft] * 6 + [made.verify] * 3 + [made.add, made.remove, made.sample]
        kinds[int(made.rng.integers(len(kinds)))]()
    return made


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize(
    ("exchange", "seed", "method", "dtype"),
    [
        ("batch", 1, "block", torch.float32),
        ("batch", 2, "standard", torch.bfloat16),
        ("vocab", 2, "standard", torch.bfloat16),
        ("replicate", 1, "block", torch.float32),
        ("auto", 4, "block", torch.bfloat16),
    ],
)
def test_life(ranks, exchange, seed, method, dtype):
    """Catches rows of another request, step or block, and any that hold no draft: those are NaN.

    Slots are reused, owners balanced anew, drafts wait, are too few, or were never kept.
    """
    made = script(seed, method, dtype)
    kinds = [kind for kind, *_ in made.events]
    assert min(kinds.count(kind) for kind in ("draft", "verify", "remove", "sample")) > 2
    results = ranks.run(live, made.events, exchange, method)
    columns = [len(part) for part in torch.arange(V + PADDING).chunk(ranks.size)]
    columns += [1] * (ranks.size - len(columns))
    for rank, (got, size, kept) in enumerate(results):
        assert kept == ({"batch", "vocab"} if exchange == "auto" else {exchange})
        for i, (answer, wanted) in enumerate(zip(got, made.answers, strict=True)):
            assert answer == wanted, (i, made.events[i])
        owned, width = -(-SLOTS // ranks.size) * K, columns[0 if exchange == "auto" else rank]
        most = {"batch": owned * V, "vocab": SLOTS * K * width, "replicate": SLOTS * K * V}
        most["auto"] = max(most["batch"], most["vocab"])
        assert size == most[exchange] * dtype.itemsize


def bytes_after_a_draft(mesh, cases: list[tuple]) -> list[int]:
    """Bytes of each cache after one request of many drew a draft; without it there are none."""
    sizes = []
    for slots, size, steps, dtype, exchange in cases:
        state = SamplingState(
            mesh,
            vocab_size=size,
            max_num_reqs=slots,
            num_speculative_tokens=steps,
            exchange=exchange,
            seed=0,
        )
        state.add(slots - 1, SamplingParams())
        assert state.drafts.bytes == 0
        plan = BatchSharder(state).plan([slots - 1])
        rows = torch.zeros(1, size, dtype=dtype, device=mesh.device_type)
        greedy = DraftSampler(state, greedy=True)
        greedy(shard_vocab(plan.select(rows), mesh), plan, step=0)
        assert state.drafts.bytes == 0
        DraftSampler(state)(shard_vocab(plan.select(rows), mesh), plan, step=0)
        sizes.append(state.drafts.bytes)
    return sizes


@worlds(*FEW_WORLDS)
def test_bytes(ranks):
    """Catches a cache of all slots on every rank, or of padded or float32 logits."""
    cases = [
        (slots, size, steps, dtype, exchange)
        for slots, size, steps in ((1, 10, 1), (7, 13, 2), (8, 3, 5), (256, 1003, 3))
        for dtype in (torch.float32, torch.bfloat16)
        for exchange in EXCHANGES
    ]
    for rank, sizes in enumerate(ranks.run(bytes_after_a_draft, cases)):
        for got, (slots, size, steps, dtype, exchange) in zip(sizes, cases, strict=True):
            columns = [*map(len, torch.arange(size).chunk(ranks.size)), *[1] * ranks.size][rank]
            wanted = {
                "batch": -(-slots // ranks.size) * steps * size,
                "vocab": slots * steps * columns,
                "replicate": slots * steps * size,
            }
            assert got == wanted[exchange] * dtype.itemsize


def kept_after(mesh, event: str) -> tuple[int, list[int]]:
    """Of two drawn drafts of a slot: how many are kept after an event, and what they then judge.

    A draft is drawn from logits that leave id 3 alone.
    """
    state = SamplingState(mesh, vocab_size=4, max_num_reqs=2, num_speculative_tokens=2, seed=0)
    state.add(0, SamplingParams())
    sharder, drafter = BatchSharder(state), DraftSampler(state)

    def logits_of(plan, *ids: int):
        rows = torch.full((len(ids), 4), -torch.inf)
        rows[range(len(ids)), ids] = 0
        return shard_vocab(plan.select(rows.to(mesh.device_type)), mesh)

    for step in range(2):
        plan = sharder.plan([0])
        drafter(logits_of(plan, 3), plan, step=step)
    plan = sharder.plan([0])
    match event:
        case "a new block":
            drafter(logits_of(plan, 3), plan, step=0)
        case "a greedy block":
            DraftSampler(state, greedy=True)(logits_of(plan, 3), plan, step=0)
        case "remove":
            state.remove(0)
            state.add(0, SamplingParams())
        case "sample":
            Sampler(state)(logits_of(plan, 3), plan)
        case "verify":
            RejectionSampler(state)(logits_of(plan, 3), plan, [[]])
    kept = state.drafts.steps(0)
    # The target wants ids 1, 1 and 2. Chosen drafts of those pass, and drawn ones that have a q.
    plan = sharder.plan([0], [3])
    tokens = RejectionSampler(state)(logits_of(plan, 1, 1, 2), plan, [[1, 1]]).token_ids
    return kept, tokens[0].tolist()


EVENTS = {
    # Drafts kept, tokens.
    "a new block": (1, [1, 1, -1]),
    "a greedy block": (0, [1, 1, 2]),
    "remove": (0, [1, 1, 2]),
    "sample": (0, [1, 1, 2]),
    "verify": (0, [1, 1, 2]),
}


@worlds("cpu:1", "cpu:4")
@pytest.mark.parametrize("event", EVENTS)
def test_drafts_are_void_after(ranks, event):
    """Catches draft logits that outlive the block, or the request, that they were drawn for."""
    assert ranks.run(kept_after, event) == [EVENTS[event]] * ranks.size


def refused_drafts(mesh, first: str) -> tuple[list[str], list[int]]:
    """What is said of drafts that do not fit beside others, and tokens of a good step after."""
    P, size, said = mesh.size(), 10 * mesh.size(), []
    state = SamplingState(mesh, vocab_size=size, max_num_reqs=8, num_speculative_tokens=1, seed=0)
    for slot in range(8):
        state.add(slot, SamplingParams(seed=slot))
    sharder, drafter, verifier = BatchSharder(state), DraftSampler(state), RejectionSampler(state)

    def draft(slots: list[int], exchange: str, width: int) -> torch.Tensor:
        plan = sharder.plan(slots, exchange=exchange)
        rows = torch.zeros(len(slots), width, device=mesh.device_type)
        return drafter(shard_vocab(plan.select(rows), mesh), plan, step=0)[:, None]

    def verify(drafts: torch.Tensor) -> list[int]:
        plan = sharder.plan([0, 1], [2, 2])
        rows = torch.zeros(4, size, device=mesh.device_type)
        return verifier(shard_vocab(plan.select(rows), mesh), plan, drafts).num_sampled.tolist()

    def attempt(exchange: str, width: int) -> None:
        try:
            draft([2, 3], exchange, width)
        except ValueError as refused:
            said.append(str(refused))
        else:
            said.append("")

    drafts = draft([0, 1], first, size)
    attempt("vocab", size + P)
    attempt("batch", size)
    attempt("replicate", size)
    counts = verify(drafts)
    for slot in (2, 3):
        state.remove(slot)
        state.add(slot, SamplingParams(seed=slot))
    assert state.drafts.exchange is None
    attempt("vocab", size + P)
    attempt("replicate", size)
    return said, counts + verify(draft([0, 1], "batch", size))


@worlds("cpu:2", "cpu:4")
@pytest.mark.parametrize("first", ["vocab", "batch"])
def test_drafts_that_do_not_fit_beside_others(ranks, first):
    """Catches drafts that overwrite those of others, which lie in the same memory otherwise."""
    (said, counts), *others = ranks.run(refused_drafts, first)
    assert others == [(said, counts)] * (ranks.size - 1)
    wide, batch, replicate, wide_again, replicate_again = said
    binds = f'exchange must be "{first}", under which drafts are kept'
    if first == "vocab":
        columns = f"draft_logits must have {10 * ranks.size} columns with padding"
        assert columns in wide
        assert columns in wide_again
        assert binds in batch
    else:
        assert binds in wide
        assert "no room for draft logits of" in wide_again
        assert batch == ""
    assert binds in replicate
    assert 'exchange must be "batch", as there is no room' in replicate_again
    assert counts == [2] * 4  # the same logits draft and verify: all are accepted


def plans_around_drafts(mesh, exchange: str) -> list[bool]:
    """Whether a plan is that of the step before: at first, while drafts wait, and after."""
    state = SamplingState(
        mesh, vocab_size=V, max_num_reqs=2, num_speculative_tokens=1, exchange=exchange, seed=0
    )
    for slot in range(2):
        state.add(slot, SamplingParams(seed=slot))
    sharder, drafter, verifier = BatchSharder(state), DraftSampler(state), RejectionSampler(state)
    rows, found = torch.zeros(4, V, device=mesh.device_type), []
    for _ in range(2):
        plan = sharder.plan([0, 1])
        found.append(sharder.plan([0, 1]) is plan)
        logits = shard_vocab(plan.select(rows[:2]), mesh)
        drafts = drafter(logits, plan, step=0)[:, None]
        plan = sharder.plan([0, 1], [2, 2])
        found.append(sharder.plan([0, 1], [2, 2]) is plan)
        counts = verifier(shard_vocab(plan.select(rows), mesh), plan, drafts).num_sampled
        assert counts.tolist() == [2, 2]
    return found


@worlds("cpu:2")
@pytest.mark.parametrize("exchange", [*EXCHANGES, "auto"])
def test_plans_are_made_anew_while_drafts_wait(ranks, exchange):
    """Catches a plan that does not know of drafts, and plans made anew with none waiting."""
    for found in ranks.run(plans_around_drafts, exchange):
        assert found == [True, False] * 2


def drafted_at_last(mesh, exchange: str) -> tuple[list[list[int]], list[int]]:
    """Drafts of a step that a processor let fail at first, and how many of each were kept then."""
    fails, found, kept = [True, False, False], [], []

    def moody(values, rows):
        if fails and fails.pop(0):
            raise ValueError("not yet")
        return values

    moody.per_token = True  # type: ignore[attr-defined]
    for processors in ((moody,), ()):
        state = SamplingState(
            mesh,
            vocab_size=V,
            max_num_reqs=2,
            num_speculative_tokens=1,
            exchange=exchange,
            processors=processors,
            seed=0,
        )
        for slot in range(2):
            state.add(slot, SamplingParams(seed=slot))
        sharder, drafter = BatchSharder(state), DraftSampler(state)

        rows = torch.randn(2, V, generator=torch.Generator().manual_seed(0)).to(mesh.device_type)
        for attempt in range(1 + len(processors)):
            plan = sharder.plan([0, 1])
            logits = shard_vocab(plan.select(rows), mesh)
            if attempt < len(processors):
                with pytest.raises(ValueError, match="not yet"):
                    drafter(logits, plan, step=0)
                kept = [state.drafts.steps(slot) for slot in range(2)]
            else:
                found.append(drafter(logits, plan, step=0).tolist())
    return found, kept


@worlds("cpu:2")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_draft_step_that_failed_can_run_again(ranks, exchange):
    """Catches drafts that count as kept though a processor raised before any was drawn."""
    for (again, plain), kept in ranks.run(drafted_at_last, exchange):
        assert (again, kept) == (plain, [0, 0])

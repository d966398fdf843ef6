"""Steps of a few shapes, and their CUDA graphs: the eager bits over the life of an engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    GraphedStep,
    RejectionSampler,
    Sampler,
    SamplerOutput,
    SamplingParams,
    SamplingState,
    TokenBitmask,
    replicated,
)
from dtensor_sample.graphed import _Graph
from tests.batches import random_batch, random_params, shard_vocab
from tests.pool import FEW_WORLDS, worlds
from tests.processing import random_processing

V, PADDING, K, SLOTS = 61, 3, 3, 9
NAMES = ("token_ids", "num_sampled", "num_rejected", "num_nans", "failed")
CAPACITIES = (2, 5, (K + 1) * SLOTS)


class Engine:
    """One state and the three steps of it, as they are or in graphs."""

    def __init__(self, mesh, exchange: str, method: str, graphed: bool) -> None:
        self.mesh = mesh
        self.state = SamplingState(
            mesh,
            vocab_size=V,
            max_num_reqs=SLOTS,
            num_speculative_tokens=K,
            exchange=exchange,
            seed=3,
        )
        self.sharder = BatchSharder(self.state)
        self.sampler, self.drafter = Sampler(self.state), DraftSampler(self.state)
        self.verifier = RejectionSampler(self.state, method=method)
        steps = {name: getattr(self, name) for name in ("sample", "draft", "verify")}
        self.graphs = {
            name: GraphedStep(fn, self.state, capacities=CAPACITIES)
            for name, fn in steps.items()
            if graphed
        }

    def sample(self, plan, rows):
        return self.sampler(shard_vocab(plan.select(rows), self.mesh), plan)

    def draft(self, plan, rows):
        steps = [
            self.drafter(shard_vocab(plan.select(rows[:, k]), self.mesh), plan, step=k)
            for k in range(K)
        ]
        return {"drafts": torch.stack(steps, 1)}

    def verify(self, plan, rows, drafts):
        return self.verifier(shard_vocab(plan.select(rows), self.mesh), plan, drafts)

    def run(self, name: str, slots, rows, positions, *tensors):
        inputs = [t.to(self.mesh.device_type) for t in tensors]
        if (graphed := self.graphs.get(name)) is not None:
            output = graphed(graphed.plan(slots, rows, positions=positions), *inputs)
        else:
            plan = self.sharder.plan(slots, rows, positions=positions)
            output = getattr(self, name)(plan, *inputs)
        if isinstance(output, SamplerOutput):
            told = vars(output.logprobs) if output.logprobs is not None else {}
            found = {n: getattr(output, n).tolist() for n in NAMES}
            return found | {n: x.tolist() for n, x in told.items()}
        return output["drafts"].tolist()


def life(
    mesh, exchange: str, method: str, steps: int, asking: float, edited: bool
) -> tuple[int, int]:
    """Compare two engines step by step; how many steps ran, and how many graphs there were.

    `asking` is the share of requests that ask to be told about their tokens; `edited`: others ask
    for biases, penalties and bans.
    """
    rng = np.random.default_rng(5)
    plain, graphed = (Engine(mesh, exchange, method, on) for on in (False, True))
    live: set[int] = set()
    drafted: dict[int, list[int]] = {}

    def both(name, slots, *args):
        wanted, got = (engine.run(name, slots, *args) for engine in (plain, graphed))
        assert got == wanted, (name, slots)
        live_slots = sorted(live)
        at = [e.state.positions[live_slots].tolist() for e in (plain, graphed)]
        assert at[0] == at[1], name
        return wanted

    def logits(count: int) -> torch.Tensor:
        made = random_batch(int(rng.integers(2**32)), count, V, padding=PADDING).logits
        return (made / 4).to(torch.bfloat16)

    for _ in range(steps):
        for slot in rng.permutation(SLOTS)[:2].tolist():
            if slot in live and rng.random() < 0.3:
                live.discard(slot)
                drafted.pop(slot, None)
                for engine in (plain, graphed):
                    engine.state.remove(slot)
            elif slot not in live:
                live.add(slot)
                made = random_processing if edited else random_params
                params, position = made(rng, V), int(rng.integers(2**40))
                prompt = rng.integers(0, V, rng.integers(0, 6)).tolist()
                if rng.random() < asking:
                    params = replace(params, logprobs=2, kept_capacity=3, entropy=True)
                for engine in (plain, graphed):
                    engine.state.add(slot, params, prompt_token_ids=prompt, position=position)
        slots = rng.permutation(sorted(live)).tolist()[: int(rng.integers(SLOTS + 1))]
        given = rng.integers(2**40, size=len(slots)).tolist() if rng.random() < 0.2 else None
        kind = rng.integers(3)
        if kind == 0:
            both("sample", slots, None, given, logits(len(slots)))
        elif kind == 1:
            rows = logits(len(slots) * K).view(len(slots), K, V + PADDING)
            drawn = both("draft", slots, None, given, rows)
            drafted.update(zip(slots, drawn, strict=True))
        else:
            rows = rng.integers(1, K + 2, len(slots)).tolist()
            chosen = [drafted.get(s, rng.integers(-1, V, K).tolist()) for s in slots]
            drafts = torch.tensor(chosen, dtype=torch.int64).view(len(slots), K)
            both("verify", slots, rows, given, logits(sum(rows)), drafts)
        if kind != 1:
            for slot in slots:
                drafted.pop(slot, None)
    count = sum(g.num_graphs for g in graphed.graphs.values())
    for g in graphed.graphs.values():
        g.close()
    return steps, count


@worlds(*FEW_WORLDS)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "edited", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "edited"]
)
@pytest.mark.parametrize(
    ("exchange", "method"), [("batch", "block"), ("vocab", "standard"), ("replicate", "block")]
)
def test_a_life_in_graphs(ranks, exchange, method, edited):
    """Catches anything that a graph has frozen: plans, params, seeds, owners, drafts, their places.

    And tables of biases, counts and bad words that have moved. On CPUs the same padded steps run
    without graphs.
    """
    steps = 1000 if ranks.device_type == "cuda" else 12
    steps = min(steps, 300) if edited else steps  # of many kinds: each is captured
    results = ranks.run(life, exchange, method, steps, 0.0, edited, timeout=280)
    assert results == [results[0]] * ranks.size
    assert (results[0][1] > 10) == (ranks.device_type == "cuda")


@pytest.mark.slow
@worlds(*FEW_WORLDS)
@pytest.mark.parametrize(("exchange", "method"), [("batch", "standard"), ("vocab", "block")])
def test_a_life_in_graphs_that_tell(ranks, exchange, method):
    """Catches what is told of other rows, or to requests that did not ask, in padded steps."""
    steps = 400 if ranks.device_type == "cuda" else 10
    results = ranks.run(life, exchange, method, steps, 0.2, True, timeout=280)
    assert results == [results[0]] * ranks.size
    assert (results[0][1] > 10) == (ranks.device_type == "cuda")


def masked_steps(mesh, exchange: str) -> list[list[int]]:
    """Tokens under masks that change from step to step, in a graph and as they are."""
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=SLOTS, exchange=exchange, seed=3)
    for slot in range(SLOTS):
        state.add(slot, SamplingParams(seed=slot))
    sampler, generator = Sampler(state), torch.Generator().manual_seed(7)

    def masked(plan, rows, bitmask):
        logits = shard_vocab(plan.select(rows), mesh)
        return sampler(logits, plan, mask=TokenBitmask(bitmask=bitmask)).token_ids

    step, found = GraphedStep(masked, state, capacities=[SLOTS]), []
    for count in (3, SLOTS, 1, 5, 4, SLOTS):
        rows = torch.randn(count, V, generator=generator).to(mesh.device_type)
        words = torch.randint(-(2**31), 2**31, (count, 2), generator=generator, dtype=torch.int32)
        words[:, 0] |= 1
        words[0] = 0  # a grammar that allows nothing
        positions = list(range(count))
        plan = step.plan(range(count), positions=positions)
        bitmask = words.to(mesh.device_type)
        got = step(plan, rows, bitmask)[:, 0].tolist()
        plan = BatchSharder(state).plan(range(count), positions=positions)
        assert got == masked(plan, rows, bitmask)[:, 0].tolist()
        assert got[0] == -1
        for row, token in zip(words[1:].tolist(), got[1:], strict=True):
            assert row[token // 32] >> token % 32 & 1
        found.append(got)
    step.close()
    return found


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("exchange", ["batch", "vocab", "replicate"])
def test_masks_in_graphs(ranks, exchange):
    """Catches a grammar's mask that a graph has frozen, or that it reads past its rows."""
    results = ranks.run(masked_steps, exchange)
    assert results == [results[0]] * ranks.size


class Replays:
    """A graph that runs the step again, where there is no CUDA to capture it."""

    def __init__(self, run) -> None:
        self.replay = run


def captured(step: GraphedStep) -> GraphedStep:
    """Let a step make such graphs, host parts kept apart as of those that are captured."""

    def capture(arguments):
        parts = step.state.host_parts = []
        try:
            output = step.fn(*arguments)
        finally:
            step.state.host_parts = None
        return _Graph(Replays(lambda: None), output, parts, {})  # type: ignore[arg-type]

    step._captures, step._capture = True, capture  # type: ignore[method-assign]
    return step


def kinds_of_steps(mesh) -> tuple[list[int], int]:
    """How many graphs there are after steps of several kinds, three of each, and eager runs."""
    state = state_of(mesh)
    sampler, ran, counts = Sampler(state), [], []

    def run(plan, rows):
        ran.append(plan)
        return sampler(shard_vocab(plan.select(rows), mesh), plan)

    step = captured(GraphedStep(run, state, capacities=[4], max_graphs=3))
    rows = torch.zeros(1, V)
    state.add(4, SamplingParams(temperature=0.0))
    kinds: list[list[int]] = [[1], [4]]
    for top in range(1, 4):
        state.add(5 + top, SamplingParams(logprobs=top))
        kinds.append([5 + top])
    for slots in kinds:
        for _ in range(3):
            step(step.plan(slots), rows)
        step(step.plan([1]), rows)  # so it never is the one that was not taken for longest
        counts.append(step.num_graphs)
    step(step.plan([4]), rows)  # which was, and begins anew
    step.close()
    return counts, len(ran)


@worlds("cpu:2")
def test_graphs_are_no_more_than_wanted(ranks):
    """Catches graphs without end where requests ask to be told something else each time."""
    for counts, ran in ranks.run(kinds_of_steps):
        assert counts == [1, 2, 3, 3, 3]
        assert ran == 2 * 5 + 1


def refused_on_replay(mesh) -> list[bool]:
    """Whether drafts are those of before, after a replay of which the second plan was refused."""
    state = state_of(mesh, num_speculative_tokens=1, exchange="batch")
    drafter, verifier = DraftSampler(state), RejectionSampler(state)

    def run(plans, rows):
        plan, verifying = plans
        logits = shard_vocab(plan.select(rows), mesh)
        drafts = drafter(logits, plan, step=0)[:, None]
        rows = rows.repeat_interleave(2, 0)
        return verifier(shard_vocab(verifying.select(rows), mesh), verifying, drafts)

    def plans(slots):
        drafting = step.plan(slots)
        return drafting, step.plan(slots, [2] * len(slots), after=drafting)

    step = captured(GraphedStep(run, state, capacities=[8]))
    rows = torch.zeros(2, V)
    for _ in range(3):
        step(plans([0, 1]), rows)
    alone = BatchSharder(state).plan([2, 3])
    drafter(shard_vocab(alone.select(rows), mesh), alone, step=0)
    before, refused = state.drafts.saved(), []
    given = plans([0, 1])
    broken = replace(given[1], draft_blocks=tuple(b + 1 for b in given[1].draft_blocks))
    try:
        step((given[0], broken), rows)
    except ValueError as error:
        refused.append("made after the drafts" in str(error))
    refused.append(state.drafts.saved() == before)
    step(plans([0, 1]), rows)
    step.close()
    return refused


@worlds("cpu:2")
def test_a_refused_replay_changes_nothing(ranks):
    """Catches drafts that the host takes for kept, though nothing of the step ran."""
    assert ranks.run(refused_on_replay) == [[True, True]] * 2


def state_of(mesh, **kwargs) -> SamplingState:
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=SLOTS, seed=0, **kwargs)
    for slot in range(4):
        state.add(slot, SamplingParams(seed=slot))
    return state


def refusals(mesh) -> tuple[list[str], list[int]]:
    """What a step says to bad arguments, and that the next one works."""
    state = state_of(mesh)
    sampler, said = Sampler(state), []
    step = GraphedStep(
        lambda plan, rows: sampler(shard_vocab(plan.select(rows), mesh), plan),
        state,
        capacities=[1],
    )
    rows = torch.randn(4, V, generator=torch.Generator().manual_seed(1)).to(mesh.device_type)
    wide = GraphedStep(lambda plan: plan, state, capacities=[1, 4])
    old = step.plan([0])
    state.remove(0)
    state.add(0, SamplingParams(seed=0))
    fits = list(range(mesh.size()))[:4]
    for attempt in (
        lambda: step.plan([0, 1, 2, 3]),
        lambda: step(old, rows[:1]),
        lambda: step(step.plan([0]), shard_vocab(rows[:1], mesh)),
        lambda: step(step.plan([0]), torch.zeros(2 * mesh.size(), V)),
        lambda: step(step.plan([0, 1]), rows[:1]),
        lambda: step(BatchSharder(state_of(mesh)).plan([0]), rows[:1]),
        lambda: step("plan", rows[:1]),  # type: ignore[arg-type]
        lambda: wide.plan([0, 1, 2], after=wide.plan([0])),
    ):
        try:
            attempt()
        except ValueError as refused:
            said.append(str(refused))
        else:
            said.append("")
    return said, step(step.plan(fits), rows[: len(fits)]).token_ids[:, 0].tolist()


@worlds("cpu:2", "cuda:2")
def test_refusals(ranks):
    """Catches bad arguments that reach a graph, and a step after them that fails."""
    results = ranks.run(refusals)
    assert results == [results[0]] * 2
    said, tokens = results[0]
    wanted = (
        "capacities must reach 2 rows an owner, got [1]",
        "plan must be made after the request in slot 0 was added",
        "tensors[0] must be a plain tensor, got DTensor",
        "tensors[0] must have 1 to 2 rows, as many as requests in the plan to as many as fit, got",
        "tensors[0] must have 2 to 2 rows, as many as requests in the plan to as many as fit, got",
        "plan must be made for this sampler's state",
        "plan must be a ShardPlan, got str",
        "after must be a plan with room for 3 requests",
    )
    for text, part in zip(said, wanted, strict=True):
        assert part in text
    assert min(tokens) >= 0


def like_the_latest(mesh) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """What is said to bad calls with the plan of the latest good one; tokens of calls like it."""
    state, said, found = state_of(mesh), [], []
    sampler = Sampler(state)
    step = GraphedStep(
        lambda plan, rows: sampler(shard_vocab(plan.select(rows), mesh), plan),
        state,
        capacities=[2],
    )
    rows = torch.randn(2, V, generator=torch.Generator().manual_seed(1)).to(mesh.device_type)
    plan = step.plan([0, 1])

    def after_another() -> None:
        state.remove(1)
        state.add(1, SamplingParams(seed=9))
        step(plan, rows)

    for attempt in (
        lambda: step(plan, shard_vocab(rows, mesh)),
        lambda: step(plan, rows.tolist()),  # type: ignore[arg-type]
        lambda: step(plan, rows[:1]),
        lambda: step(plan, rows[0, 0]),
        lambda: step(np.array([1, 2]), rows),  # type: ignore[arg-type]
        lambda: step((plan, np.array([1, 2])), rows),  # type: ignore[arg-type]
        after_another,
    ):
        found.append(step(plan, rows).token_ids[:, 0].tolist())
        try:
            attempt()
        except ValueError as refused:
            said.append(str(refused))
    plan = step.plan([0, 1])
    found += [step(plan, given).token_ids[:, 0].tolist() for given in (rows, rows, rows.half())]
    alone, wanted = state_of(mesh), []
    for number in range(10):
        if number == 7:
            alone.remove(1)
            alone.add(1, SamplingParams(seed=9))
        plan = BatchSharder(alone).plan([0, 1])
        given = rows.half() if number == 9 else rows
        output = Sampler(alone)(shard_vocab(plan.select(given), mesh), plan)
        wanted.append(output.token_ids[:, 0].tolist())
    return said, found, wanted


@worlds("cpu:1", "cuda:1")
def test_a_call_like_the_latest(ranks):
    """Catches checks that are skipped for a call that is not like the latest one."""
    said, found, wanted = ranks.run(like_the_latest)[0]
    assert [text.split(", got")[0].split(" to ")[0] for text in said] == [
        "tensors[0] must be a plain tensor",
        "tensors[0] must be a plain tensor",
        "tensors[0] must have 2",
        "tensors[0] must have 2",
        "plan must be a ShardPlan",
        "plan must be a ShardPlan",
        "plan must be made after the request in slot 1 was added",
    ]
    assert found == wanted


def short_of_rows(mesh, form: str) -> list[object]:
    """Tokens, or what is said, when a step of two rows a request is given fewer now and then."""
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=4, num_speculative_tokens=1, seed=0)
    for slot in range(2):
        state.add(slot, SamplingParams(temperature=0))
    verifier, found = RejectionSampler(state), []
    rows = torch.zeros(4, V, device=mesh.device_type)
    rows[:, 5] = 1.0
    drafts = torch.full((2, 1), 5, device=mesh.device_type)

    def verify(plan, hidden, token_ids):
        if form == "DTensor":
            return verifier(plan.select(replicated(hidden, mesh)), plan, token_ids).token_ids
        hidden = hidden.flatten(0, 1) if form == "pairs" else hidden
        return verifier(shard_vocab(plan.select(hidden), mesh), plan, token_ids).token_ids

    step = GraphedStep(verify, state, capacities=[4])
    for count in (4,) * 3 if form == "pairs" else (2, 4, 4, 3, 4, 2):
        try:
            given = rows[:count].unflatten(0, (-1, 2)) if form == "pairs" else rows[:count]
            found.append(step(step.plan([0, 1], [2, 2]), given, drafts).tolist())
        except ValueError as refused:
            found.append(str(refused))
    step.close()
    return found


@worlds("cpu:2", "cuda:2")
def test_rows_of_pairs_are_enough(ranks):
    """Catches a step that counts the rows of what it was given, where others are selected."""
    for found in ranks.run(short_of_rows, "pairs"):
        assert found == [[[5, 5]] * 2] * 3


@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize("form", ["plain", "DTensor"])
def test_a_step_that_is_short_of_rows(ranks, form):
    """Catches tokens that are drawn from padding, where a row for each request was given."""
    for found in ranks.run(short_of_rows, form):
        assert found[1] == found[2] == found[4] == [[5, 5]] * 2
        for place, count in ((0, 2), (3, 3), (5, 2)):
            assert (
                f"tensors[0] must have at least 4 rows, which plan.select picks from, got {count}"
                in found[place]
            )


def rows_seen(mesh) -> list[list[float]]:
    """What a step sees of a tensor whose rows become fewer, then more, as requests do."""
    step = GraphedStep(lambda plan, x: x[None] + 0, state_of(mesh), capacities=[4])
    seen = [
        step(step.plan(range(count)), torch.ones(count, device=mesh.device_type))[0].tolist()
        for count in (4, 4, 2, 1, 3)
    ]
    step.close()
    return seen


@worlds("cpu:1", "cuda:1")
def test_rows_that_are_not_given_are_zeros(ranks):
    """Catches rows of an earlier step, of another request maybe, that a graph still reads."""
    (seen,) = ranks.run(rows_seen)
    assert seen == [[1.0] * count + [0.0] * (4 - count) for count in (4, 4, 2, 1, 3)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("fn", 3), ("state", None), ("capacities", []), ("capacities", [0]), ("max_graphs", 0)],
)
@worlds("cpu:1")
def test_refused_at_construction(ranks, name, value):
    assert name in ranks.run(constructed, name, value)[0]


def constructed(mesh, name, value) -> str:
    arguments = {"fn": print, "state": state_of(mesh), "capacities": [1], name: value}
    try:
        GraphedStep(**arguments)
    except ValueError as refused:
        return str(refused)
    return ""

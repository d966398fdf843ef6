"""Steps with drafts give the oracle's tokens, wherever rows, drafts and caches lie."""

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    SamplingParams,
    SamplingState,
    ops,
    replicated,
    vocab_sharded,
)
from dtensor_sample.params import filters_of
from tests.batches import EXCHANGES, OWNERS, Layout, shard_vocab
from tests.pool import FEW_WORLDS, worlds
from tests.speculation import Speculation, expected, random_speculation, speculative_step

METHODS = ("standard", "block")
DTYPES = (
    # Target, draft.
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
)
STEPS = [
    # Requests, V, K, padding
    (17, 13, 3, 3),
    (11, 3, 4, 0),
    (7, 111, 2, 1),
    (1, 2, 1, 2),
    (3, 50, 6, 0),
    (0, 7, 2, 0),
]


@lru_cache
def steps() -> list[Speculation]:
    """Steps of every size and pair of dtypes."""
    return [
        random_speculation(10 * i + j, size, V, K, padding=padding, dtype=target, draft_dtype=draft)
        for i, (target, draft) in enumerate(DTYPES)
        for j, (size, V, K, padding) in enumerate(STEPS)
    ]


@lru_cache
def answers(method: str) -> list[dict[str, list]]:
    return [expected(step, method) for step in steps()]


def run_steps(mesh, steps, layouts, method) -> list[dict[str, list]]:
    return [
        speculative_step(mesh, step, layout, method)
        for step, layout in zip(steps, layouts, strict=True)
    ]


def test_steps_are_worth_testing():
    """Catches random steps that never accept, reject, fail or end early."""
    outcomes = [
        (len(request.chosen) < request.k, request.k, sampled, failed)
        for step, wanted in zip(steps(), answers("block"), strict=True)
        for request, sampled, failed in zip(
            step.requests, wanted["num_sampled"], wanted["failed"], strict=True
        )
    ]
    for drawn in (False, True):
        kinds = [(k, sampled, failed) for d, k, sampled, failed in outcomes if d == drawn]
        print(
            len(kinds),
            sum(sampled == k + 1 and k > 0 for k, sampled, _ in kinds),
            sum(1 < sampled < k + 1 for k, sampled, _ in kinds),
            sum(sampled <= 1 and k > 0 for k, sampled, _ in kinds),
            sum(failed and sampled > 0 for k, sampled, failed in kinds),
        )
        assert sum(sampled == k + 1 and k > 0 for k, sampled, _ in kinds) > 5
        assert sum(1 < sampled < k + 1 for k, sampled, _ in kinds) > 3
        assert sum(sampled <= 1 and k > 0 for k, sampled, _ in kinds) > 5
        assert sum(failed and sampled > 0 for k, sampled, failed in kinds) > 0


@pytest.mark.parametrize("exchange", EXCHANGES[:3])
@pytest.mark.parametrize("method", METHODS)
def test_random_steps(ranks, method, exchange):
    """Catches a wrong row, coin, residual or count in some exchange, dtype, size or mixture."""
    rng = np.random.default_rng(0)
    part = slice((EXCHANGES.index(exchange) + METHODS.index(method)) % 3, None, 3)
    layouts = [
        Layout(
            exchange=exchange,
            owners=OWNERS[i % 3],
            spare=i % 2 if exchange == "batch" else 0,
            slots=(rng.permutation(len(step) + 3)[: len(step)]).tolist(),
        )
        for i, step in enumerate(steps()[part])
    ]
    for results in ranks.run(run_steps, steps()[part], layouts, method):
        assert results == answers(method)[part]


@lru_cache
def bounded_steps() -> list[Speculation]:
    """The larger steps of each pair of dtypes, with a top-k of at most 64 for every request."""
    rng = np.random.default_rng(1)
    found = []
    for step in steps():
        requests = [
            replace(r, params=replace(r.params, top_k=int(rng.integers(2, 65))))
            for r in step.requests
        ]
        if len(requests) > 3:
            found.append(replace(step, requests=requests))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_few_candidates(ranks, method):
    """Catches drafts judged by masses that lists lack, or that are not the same on all ranks."""
    tested = bounded_steps()
    assert all(filters_of([r.params for r in step.requests]).bounded for step in tested)
    wanted = [expected(step, method) for step in tested]
    layouts = [Layout(exchange="vocab")] * len(tested)
    for results in ranks.run(run_steps, tested, layouts, method):
        assert results == wanted


# --- layouts


def random_layouts(step: Speculation, count: int) -> list[Layout]:
    rng = np.random.default_rng(3)
    layouts = []
    for _ in range(count):
        exchange = str(rng.choice(EXCHANGES))
        order = rng.permutation(len(step))[: rng.choice([1, 2, len(step) // 2, len(step)])]
        layouts.append(
            Layout(
                exchange=exchange,
                owners=str(rng.choice(OWNERS)),
                order=order.tolist(),
                slots=rng.permutation(2 * len(step))[: len(step)].tolist(),
                spare=int(rng.integers(3)) if exchange in ("batch", "auto") else 0,
            )
        )
    return layouts


@pytest.mark.parametrize("method", METHODS)
def test_layouts(ranks, method):
    """Catches tokens that depend on order, slot, owner, exchange, padding or neighbours."""
    step = random_speculation(77, 14, 37, 3, padding=2, draft_dtype=torch.bfloat16)
    layouts = random_layouts(step, 8)
    wanted = [expected(step, method, layout.order) for layout in layouts]
    for results in ranks.run(run_steps, [step] * len(layouts), layouts, method):
        assert results == wanted


# --- noise between ranks


def noisy_steps(mesh, exchange: str) -> list[list[list[int]]]:
    """Steps on replicas of logits that differ a little on each rank, and then on drafts that do."""
    rank, device = mesh.get_local_rank(), mesh.device_type
    noise = torch.Generator().manual_seed(rank)
    results = []
    for method in METHODS:
        state = SamplingState(
            mesh, vocab_size=20, max_num_reqs=8, num_speculative_tokens=3, exchange=exchange, seed=0
        )
        for slot in range(8):
            temperature = (0.0, 1.0)[slot % 2] + 1e-3 * rank
            state.add(slot, SamplingParams(temperature=temperature, top_k=5 * (slot % 3)))
        sharder = BatchSharder(state)
        drafter, verifier = DraftSampler(state), RejectionSampler(state, method=method)
        for _ in range(2):
            drafts = []
            for step in range(3):
                rows = (torch.ones(8, 20) + 1e-6 * torch.randn(8, 20, generator=noise)).to(device)
                plan = sharder.plan(range(8))
                drafts.append(drafter(replicated(plan.select(rows), mesh), plan, step=step))
            plan = sharder.plan(range(8), [4] * 8)
            rows = (torch.ones(32, 20) + 1e-6 * torch.randn(32, 20, generator=noise)).to(device)
            output = verifier(replicated(plan.select(rows), mesh), plan, torch.stack(drafts, 1))
            results += [output.token_ids.tolist(), output.num_sampled[:, None].tolist()]
            results.append(state.positions[:, None].tolist())
    return results


@worlds("cpu:4", "cuda:2")
def test_noise_between_ranks_does_not_show(ranks):
    """Catches ranks that each accept on inputs that are equal only nearly, and then part ways."""
    for exchange in EXCHANGES[:3]:
        first, *others = ranks.run(noisy_steps, exchange)
        assert all(other == first for other in others)


# --- what shapes p shapes it at every place


def shaped_steps(mesh, method: str, exchange: str) -> list[list[int]]:
    """Drafts of an id that min-p, top-k or top-p leave out, at every place, a hundred times."""
    rows = torch.tensor([0.0, 0.0, -1.3, -torch.inf]).repeat(400, 1)
    state = SamplingState(
        mesh, vocab_size=4, max_num_reqs=100, num_speculative_tokens=3, exchange=exchange, seed=0
    )
    shapes = ({"min_p": 0.3}, {"top_k": 2}, {"top_p": 0.7})
    for slot in range(100):
        state.add(slot, SamplingParams(**shapes[slot % 3]))
    plan = BatchSharder(state).plan(range(100), [4] * 100)
    logits = shard_vocab(plan.select(rows.to(mesh.device_type)), mesh)
    # Id 2 comes first, second, third; the other drafts are as likely as any.
    drafts = [[2 if j == slot % 4 else slot % 2 for j in range(3)] for slot in range(100)]
    return RejectionSampler(state, method=method)(logits, plan, drafts).token_ids.tolist()


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("method", METHODS)
def test_filters_hold_for_every_row(ranks, method):
    """Catches filters applied to the last row only: what they leave out is never emitted."""
    for exchange in EXCHANGES[:3]:
        for emitted in ranks.run(shaped_steps, method, exchange):
            assert {token for row in emitted for token in row} == {-1, 0, 1}
            assert max(sum(token >= 0 for token in row) for row in emitted) == 4


# --- what is read


@pytest.mark.parametrize("seed", range(5))
def test_residuals_that_are_left_out_decide_nothing(seed):
    """Catches any left out that could let a prefix pass or is drawn from, and many that are not.

    Residuals are anything up to their ratio; coins lie at ratios and beside them, too.
    """
    generator = torch.Generator().manual_seed(seed)
    Q, K = 400, 6

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def edged(x: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        kind = integers(0, 6, *x.shape)
        return torch.where(kind == 0, 0, torch.where(kind == 1, most, x))

    one = torch.tensor(ops.ONE)
    p_QK, q_QK = (edged(integers(0, ops.ONE, Q, K), one) for _ in range(2))
    limit_Q, G = integers(0, K + 1, Q), Q * K
    place_QK = torch.arange(G).view(Q, K)
    coin_QK = integers(0, 1 << 62, Q, K)
    joint_QK, _, _ = ops.prefixes(p_QK, q_QK, coin_QK, limit_Q, place_QK, G)
    beside_QK = (4 * joint_QK + integers(-5, 6, Q, K)).clamp(0, (1 << 62) - 1)
    coin_QK = torch.where(integers(0, 2, Q, K) > 0, coin_QK, beside_QK)
    _, ratio_G, wanted_G = ops.prefixes(p_QK, q_QK, coin_QK, limit_Q, place_QK, G)
    spare_G = edged((torch.rand(G, generator=generator).double() * ratio_G).long(), ratio_G)
    row_QJ = torch.arange(Q * (K + 1)).view(Q, K + 1)
    of_rows = (torch.zeros(Q * (K + 1), dtype=torch.int64),) * 2
    found = [
        ops.accept(
            *(p_QK, q_QK, coin_QK, joint_QK, spare_G[:, None, None] * kept_G[:, None, None]),
            *(limit_Q, row_QJ, place_QK, *of_rows, of_rows[0] > 0),
        )
        for kept_G in (torch.ones_like(wanted_G), (wanted_G >= 0).long())
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    accepted_Q, place_Q, _, _ = found[0]
    assert len(accepted_Q.unique()) == K + 1
    refused_Q = place_Q >= 0
    assert torch.equal(wanted_G[place_Q[refused_Q]], place_Q[refused_Q])
    count_Q = (wanted_G.view(Q, K) >= 0).sum(1)
    assert (count_Q[~refused_Q] == 0).all()  # the longest prefix passes, whatever is left
    assert count_Q.double().mean() > 0.3
    above_QK = (coin_QK >> 2) > joint_QK + (1 << 20)
    assert not (wanted_G.view(Q, K)[:, 1:] >= 0)[above_QK[:, :-1]].any()


FEW_NUMBERS = (
    "row_params", "join_peaks", "uniform", "take", "deliver", "lay_out",
     "eligible", "chances", "prefixes", "accept", "emit", "store",
)  # fmt: skip
"""Ops that read no logits."""


INDEXED = {"lookup": (8,), "residual_mass": (18, 7), "recover": (21,), "pick": (10,)}
"""Ops that read some rows of logits, and which argument, if it is given, has one entry for each."""


class Reads(TorchDispatchMode):
    """Records how many rows of logits each op reads."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func._schema.name.split("::")
        if space == "dtensor_sample" and name not in FEW_NUMBERS:
            given = [args[i] for i in (*INDEXED.get(name, ()), 2, 0) if args[i] is not None]
            self.rows[name].append(len(given[0]))
        return func(*args, **(kwargs or {}))


def reads(mesh, method: str, temperature: float, counts: list[int], drawn: bool) -> dict:
    """Rows that ops read in a step whose requests have so many drafts each."""
    state = SamplingState(mesh, vocab_size=9, max_num_reqs=4, num_speculative_tokens=3, seed=0)
    for slot in range(len(counts)):
        state.add(slot, SamplingParams(temperature=temperature))
    sharder, drafter = BatchSharder(state), DraftSampler(state)
    verifier = RejectionSampler(state, method=method)
    drafts: list[list[int]] = [[1] * count for count in counts]
    if drawn:
        for step in range(max(counts)):
            slots = [slot for slot, count in enumerate(counts) if count > step]
            plan = sharder.plan(slots)
            logits = shard_vocab(plan.select(torch.ones(len(slots), 9)), mesh)
            for slot, token in zip(slots, drafter(logits, plan, step=step).tolist(), strict=True):
                drafts[slot][step] = token
    plan = sharder.plan(range(len(counts)), [1 + count for count in counts])
    logits = shard_vocab(plan.select(torch.ones(sum(counts) + len(counts), 9)), mesh)
    with Reads() as recorded:
        verifier(logits, plan, drafts)
    return dict(recorded.rows)


READS = [
    # Method, temperature, drafts of each request, drawn: rows that each op reads.
    ("block", 0.0, [3, 0, 1], False, {"peak": [7]}),
    ("block", 1.0, [0, 0, 0], False, {"weigh": [3], "pick": [3]}),
    (
        "block",
        1.0,
        [3, 0, 1],
        False,
        {"weigh": [7], "lookup": [4], "residual_mass": [4], "recover": [3]},
    ),
    (
        "standard",
        1.0,
        [3, 0, 1],
        True,
        {
            "weigh": [7],
            "lookup": [4, 4],
            "residual_mass": [3],
            "recover": [3],
        },
    ),
]


@worlds("cpu:1")
@pytest.mark.parametrize("case", range(len(READS)))
def test_no_more_is_read_than_needed(ranks, case):
    """Catches rows weighed where no draft is, for greedy requests, or for drafts not drawn."""
    *args, wanted = READS[case]
    assert ranks.run(reads, *args) == [wanted]


# --- modes of torch


def steps_in_modes(mesh, exchange: str) -> list[list[list[int]]]:
    """Drafts and verification under each mode, of one state: the cache outlives them all."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(18, 7, generator=generator).to(mesh.device_type)
    results = []
    modes = (torch.no_grad, torch.inference_mode, torch.enable_grad)
    for order in (modes, modes[::-1], (*modes[1:], modes[0])):
        state = SamplingState(
            mesh, vocab_size=7, max_num_reqs=6, num_speculative_tokens=2, exchange=exchange, seed=0
        )
        for slot in range(6):
            state.add(slot, SamplingParams(temperature=2.0))
        sharder, drafter, verifier = (
            BatchSharder(state),
            DraftSampler(state),
            RejectionSampler(state),
        )
        emitted = []
        for mode in order:
            with mode():
                weight = torch.ones(7, device=mesh.device_type, requires_grad=True)
                plan, drafts = sharder.plan(range(6)), []
                for step in range(2):
                    selected = plan.select(rows[step : step + 6] * weight)
                    drafts.append(drafter(shard_vocab(selected, mesh), plan, step=step))
                plan = sharder.plan(range(6), [3] * 6)
                logits = shard_vocab(plan.select(rows * weight), mesh)
                emitted += verifier(logits, plan, torch.stack(drafts, 1)).token_ids.tolist()
        results.append(emitted)
    return results


@worlds(*FEW_WORLDS)
def test_modes_of_torch(ranks):
    """Catches a cache that only the mode it was made in can write, and gradients in the way."""
    for exchange in EXCHANGES[:3]:
        for results in ranks.run(steps_in_modes, exchange):
            assert results == [results[0]] * 3


def with_placeholders(step: Speculation, place: int) -> Speculation:
    """The same drafts, but -1 at one place of each block, where there is one."""
    requests = [
        replace(r, chosen=r.chosen | {place: -1}) if place < r.k else r for r in step.requests
    ]
    return replace(step, requests=requests)


@worlds("cpu:4", "cuda:2")
@pytest.mark.parametrize("method", METHODS)
def test_a_placeholder_at_every_place(ranks, method):
    """Catches a -1 that is emitted, read as an id, or does not end the block there."""
    step = random_speculation(78, 14, 13, 3)
    cases = [with_placeholders(step, place) for place in range(3)]
    wanted = [expected(case, method) for case in cases]
    kinds = {(r.params.greedy, r.draft is None) for r in step.requests if r.k}
    assert len(kinds) == 4  # greedy or not, chosen or drawn
    for place, answers in enumerate(wanted):
        sampled = zip(answers["num_sampled"], step.requests, strict=True)
        assert max(n for n, r in sampled if place < r.k) == place + 1
    layouts = [Layout(exchange=exchange) for exchange in EXCHANGES]  # one for each place
    for got in ranks.run(run_steps, cases, layouts, method):
        assert got == wanted


def strided(mesh, step: Speculation) -> list[list[list[int]]]:
    """Tokens from logits of one memory layout or another."""
    given = []
    for layout in ("plain", "transposed", "part of wider rows"):
        state = SamplingState(
            mesh, vocab_size=step.vocab_size, max_num_reqs=len(step), num_speculative_tokens=step.K
        )
        for slot, request in enumerate(step.requests):
            state.add(slot, replace(request.params, seed=slot), position=request.position)
        plan = BatchSharder(state).plan(range(len(step)), [r.k + 1 for r in step.requests])
        rows = torch.cat([r.target for r in step.requests]).to(mesh.device_type)
        local = shard_vocab(plan.select(rows), mesh).to_local()
        if layout == "transposed":
            local = local.t().contiguous().t()
        elif layout == "part of wider rows":
            local = torch.nn.functional.pad(local, (2, 3))[:, 2:-3]
        logits = vocab_sharded(local, mesh, vocab_size=step.vocab_size)
        drafts = [[r.chosen.get(j, 0) for j in range(r.k)] for r in step.requests]
        output = RejectionSampler(state)(logits, plan, drafts)
        given.append(output.token_ids.tolist())
    return given


@worlds("cpu:4", "cuda:2")
def test_strides(ranks):
    """Catches verification that takes rows to lie side by side."""
    step = random_speculation(5, 9, 37, 3)
    for plain, *others in ranks.run(strided, step):
        assert others == [plain, plain]

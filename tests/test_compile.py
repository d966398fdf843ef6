"""Compiled steps: the eager tokens, and few compilations."""

import itertools
import math
import warnings
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from dtensor_sample import (
    BatchSharder,
    Sampler,
    SamplingParams,
    SamplingState,
    TokenBitmask,
    logprobs,
    sample,
)
from tests.batches import Batch, Layout, random_batch, shard_vocab, tokens
from tests.pool import worlds
from tests.speculation import Speculation, expected, random_speculation, speculative_step

SIZE = 64


def forget_compilations(mesh) -> None:
    torch._dynamo.reset()


def compiled_steps(
    mesh, batch: Batch, exchange: str, orders: list[list[int]], backend: str = "inductor"
) -> tuple[list[list[int]], int]:
    """Tokens of compiled steps over parts of a batch, and how many graphs were compiled."""
    state = SamplingState(
        mesh, vocab_size=batch.vocab_size, max_num_reqs=len(batch), seed=batch.base_seed
    )
    for slot, params in enumerate(batch.params):
        state.add(slot, params)
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        sharder, sampler = BatchSharder(state), Sampler(state, compile=True)
    before = counters["stats"]["unique_graphs"]
    drawn = []
    for order in orders:
        positions = [batch.positions[i] for i in order]
        plan = sharder.plan(order, exchange=exchange, positions=positions)
        hidden = batch.logits[order].to(mesh.device_type)
        output = sampler(shard_vocab(plan.select(hidden), mesh), plan)
        drawn.append(output.token_ids[:, 0].tolist())
    return drawn, counters["stats"]["unique_graphs"] - before


def check(
    ranks, exchange: str, sizes: list[int], backend: str, params: SamplingParams | None = None
) -> int:
    """Compare compiled steps of these sizes with the oracle; return the number of compilations."""
    batch = random_batch(31, SIZE, 1003, dtype=torch.bfloat16, seeded=True)
    if params is not None:
        batch = replace(batch, params=[params] * SIZE)
    rng = np.random.default_rng(0)
    orders = [rng.permutation(SIZE)[:size].tolist() for size in sizes]
    every = tokens(batch)
    wanted = [[every[i] for i in order] for order in orders]
    results = ranks.run(compiled_steps, batch, exchange, orders, backend, timeout=150)
    assert [drawn for drawn, _ in results] == [wanted] * ranks.size, exchange
    compiled = [count for _, count in results]
    assert compiled == [compiled[0]] * ranks.size
    return compiled[0]


MANY_SIZES = [7, 0, 1, 2, 3, SIZE, *np.random.default_rng(1).integers(0, SIZE + 1, 94).tolist()]


@pytest.mark.slow
@worlds("cpu:2", "cuda:2")
def test_few_compilations(ranks):
    """Catches a compilation for each batch size or mixture of features, and a graph break.

    Owners often hold no row or one, which the compiler would each treat as a case of its own; and
    all exchanges of a process share the compiler's limit on variants of one function.
    """
    ranks.run(forget_compilations)
    assert check(ranks, "batch", MANY_SIZES[:24], "eager") <= 4
    assert check(ranks, "vocab", MANY_SIZES[:12], "eager") <= 4
    assert check(ranks, "replicate", MANY_SIZES[:12], "eager") <= 4


@pytest.mark.slow
@worlds("cpu:2", "cuda:2")
@pytest.mark.timeout(300)  # other work on the machine makes compiling slow
def test_compiled_tokens(ranks):
    """Catches traced arithmetic that rounds otherwise than the eager one, and lost collectives."""
    ranks.run(forget_compilations)
    # Without top-k and top-p the graph is small; `test_compiled_tokens_of_many_sizes` has the rest.
    plain = SamplingParams(min_p=0.01, seed=3)
    assert check(ranks, "vocab", [SIZE, 33], "inductor", plain) == 1


def steps_of_many_kinds(mesh, compile: bool) -> list[list[int]]:
    """Tokens of steps with every combination of edits."""
    size, found = 64, []
    state = SamplingState(mesh, vocab_size=size, max_num_reqs=2, exchange="batch", seed=0)
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        sampler, sharder = Sampler(state, compile=compile), BatchSharder(state)
    everything = torch.full((2, size // 32), -1, dtype=torch.int32, device=mesh.device_type)
    generator = torch.Generator().manual_seed(0)
    for kind in itertools.product((False, True), repeat=5):
        biased, counted, stopped, masked, filtered = kind
        params = SamplingParams(
            seed=1,
            logit_bias={3: 1.0} if biased else {},
            presence_penalty=1.0 if counted else 0.0,
            min_tokens=3 if stopped else 0,
            stop_token_ids=[1] if stopped else [],
            top_k=5 if filtered else 0,
        )
        for slot in range(2):
            state.add(slot, params)
        plan = sharder.plan([0, 1])
        rows = torch.randn(2, size, generator=generator).to(mesh.device_type)
        mask = TokenBitmask(bitmask=everything) if masked else None
        output = sampler(shard_vocab(plan.select(rows), mesh), plan, mask=mask)
        found.append(output.token_ids[:, 0].tolist())
        for slot in range(2):
            state.remove(slot)
    return found


@worlds("cpu:2", "cuda:2")
def test_compiled_steps_of_many_kinds(ranks):
    """Catches a compiler that gives up, since requests of a process ask for too much in all."""
    ranks.run(forget_compilations)
    assert ranks.run(steps_of_many_kinds, True, timeout=150) == ranks.run(
        steps_of_many_kinds, False
    )


def verified_steps(
    mesh,
    steps: list[Speculation],
    layout: Layout,
    method: str,
    backend: str,
    counts: list[list[int] | None],
) -> tuple[list[dict[str, list]], int]:
    """Results of compiled verification, and how many graphs were compiled."""
    before = counters["stats"]["unique_graphs"]
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        results = [
            speculative_step(mesh, step, layout, method, admitted)
            for step, admitted in zip(steps, counts, strict=True)
        ]
    return results, counters["stats"]["unique_graphs"] - before


def check_verified(
    ranks,
    sizes: list[int],
    exchange: str,
    method: str,
    backend: str,
    dtype: torch.dtype,
    admit: bool = False,
) -> int:
    """Compare compiled verification with the oracle; return the number of compilations.

    `admit`: of some of the drafts, under a budget.
    """
    steps = [
        random_speculation(100 + size, size, 37, 3, dtype=dtype, draft_dtype=dtype)
        for size in sizes
    ]
    layout = Layout(exchange=exchange, compile=True)
    counts = [
        [(i + r.k) % (r.k + 1) for i, r in enumerate(step.requests)] if admit else None
        for step in steps
    ]
    wanted = [
        expected(step, method, counts=admitted)
        for step, admitted in zip(steps, counts, strict=True)
    ]
    results = ranks.run(verified_steps, steps, layout, method, backend, counts, timeout=250)
    assert [got for got, _ in results] == [wanted] * ranks.size
    compiled = [count for _, count in results]
    assert compiled == [compiled[0]] * ranks.size
    return compiled[0]


@pytest.mark.slow
@worlds("cpu:2", "cuda:2")
@pytest.mark.timeout(300)
def test_compiled_verification(ranks):
    """Catches graph breaks in verification, and a compilation for each size."""
    ranks.run(forget_compilations)
    assert check_verified(ranks, [20, 9, 0, 6], "batch", "block", "eager", torch.float32) == 1
    assert check_verified(ranks, [9], "vocab", "standard", "eager", torch.bfloat16) == 1
    # Which drafts are admitted makes no other step.
    admitted = check_verified(ranks, [9, 20], "vocab", "standard", "eager", torch.bfloat16, True)
    assert admitted == 0
    assert check_verified(ranks, [9], "batch", "block", "eager", torch.float32, True) == 0


@pytest.mark.slow
@worlds("cpu:2", "cuda:2")
@pytest.mark.timeout(300)
def test_sizes_that_are_equal_by_chance(ranks):
    """Catches a rank that compiles again alone, while the others wait for it in a collective.

    The second rank has as many columns as the first step has drafts, and one more.
    """
    kind = ("vocab", "standard", "eager", torch.bfloat16)
    step = random_speculation(109, 9, 37, 3)
    assert sum(request.k for request in step.requests) + 1 == 37 // ranks.size
    ranks.run(forget_compilations)
    assert check_verified(ranks, [9], *kind) == 1
    assert check_verified(ranks, [9, 11], *kind, True) == 0


@pytest.mark.slow
@worlds("cpu:2", "cuda:2")
@pytest.mark.timeout(600)
def test_compiled_verification_of_every_kind(ranks):
    """The same for each exchange and method, and in generated code."""
    for exchange in ("batch", "vocab", "replicate"):
        for method in ("standard", "block"):
            ranks.run(forget_compilations)  # each kind has variants of its own
            sizes = [20, 9, 1, 0, 2, 17]
            assert check_verified(ranks, sizes, exchange, method, "eager", torch.float32) <= 4
    for exchange in ("batch", "vocab"):
        ranks.run(forget_compilations)
        assert check_verified(ranks, [9], exchange, "block", "inductor", torch.bfloat16) == 1
    ranks.run(forget_compilations)
    assert check_verified(ranks, [9], "batch", "block", "inductor", torch.bfloat16, True) == 1


@pytest.mark.slow
@worlds("cpu:2", "cuda:2")
@pytest.mark.timeout(600)
def test_compiled_tokens_of_many_sizes(ranks):
    """The same for each exchange and for graphs of every kind."""
    ranks.run(forget_compilations)
    for exchange in ("batch", "vocab", "replicate"):
        assert check(ranks, exchange, MANY_SIZES, "inductor") <= 4, exchange


def compiled_samples(
    mesh, exchange: str, sizes: list[int], dynamic: bool | None
) -> tuple[list[list[int]], int]:
    """Tokens of one compiled stateless call over many batch sizes, and its compilations."""
    call = partial(sample, params=SamplingParams(top_k=9, top_p=0.9), exchange=exchange)
    logits, found = random_batch(5, SIZE, 101).logits.to(mesh.device_type), []
    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    before = counters["stats"]["unique_graphs"]
    for size in sizes:
        rows = shard_vocab(logits[:size], mesh)
        found.append(compiled(rows, position=3, base_seed=7).tolist())
        assert found[-1] == call(rows, position=3, base_seed=7).tolist()
    return found, counters["stats"]["unique_graphs"] - before


@pytest.mark.slow
@worlds("cpu:1", "cpu:4", "cuda:2")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("exchange", "dynamic"),
    [("batch", None), ("batch", True), ("vocab", None), ("replicate", None)],
)
def test_a_compiled_call_of_many_sizes(ranks, exchange, dynamic):
    """Catches a number of rows that is a constant of the graph."""
    ranks.run(forget_compilations)
    sizes = [*range(2, 24), SIZE, 1, 40]
    results = ranks.run(compiled_samples, exchange, sizes, dynamic, timeout=150)
    assert results == [results[0]] * ranks.size
    assert results[0][1] <= 4


def compiled_calls(mesh, dynamic: bool | None) -> list[bool]:
    """Whether compiled calls equal plain ones, with packed filters and temperatures that change."""
    logits = shard_vocab(torch.randn(6, 50, generator=torch.Generator().manual_seed(0)), mesh)
    ids, found = torch.arange(6), []
    made = partial(torch.compile, fullgraph=True, backend="eager", dynamic=dynamic)
    draw = made(lambda logits, packed: sample(logits, packed, position=1))
    for top_k in (0, 4, 40, 45, 0):
        packed = SamplingParams.batch([SamplingParams(seed=1, top_k=top_k)] * 6, "cpu")
        found.append(torch.equal(draw(logits, packed), sample(logits, packed, position=1)))
    tell = made(lambda logits, ids, T: logprobs(logits, ids, temperature=T))
    found += [
        torch.equal(tell(logits, ids, T), logprobs(logits, ids, temperature=T))
        for T in (1.0, 0.5, 0.8, 2.0, 1e-5, 1, 2, 3)
    ]
    for T in (math.inf, math.nan, 0.0):
        with pytest.raises((ValueError, torch._dynamo.exc.TorchDynamoException)):
            tell(logits, ids, T)
    told = made(lambda logits, ids: logprobs(logits, ids))
    found.append(torch.equal(told(logits, ids), logprobs(logits, ids)))
    return found


@worlds("cpu:2")
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_calls_of_many_kinds(ranks, dynamic):
    """Catches numbers of filters and temperatures that a compiler makes symbols of, and cannot."""
    ranks.run(forget_compilations)
    assert ranks.run(quietly_compiled_calls, dynamic, timeout=150) == [[True] * 14] * 2


def quietly_compiled_calls(mesh, dynamic: bool | None) -> list[bool]:
    """The same without what torch warns of in its own way to trace autograd functions."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*should not be instantiated")
        return compiled_calls(mesh, dynamic)

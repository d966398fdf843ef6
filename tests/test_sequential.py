"""Blocks drafted left to right: the oracle's tokens, wherever the loop runs."""

import logging
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_sample import BatchSharder, DraftSampler, RejectionSampler, SamplingParams, replicated
from dtensor_sample.cost import cost_of_drafting, shape_of
from dtensor_sample.log import say
from tests.batches import shard_vocab
from tests.drafting import H, Script, begun, draft, play, sampler_of, state_of
from tests.pool import FEW_WORLDS, worlds
from tests.test_collectives import KINDS as KINDS_OF
from tests.test_collectives import CollectiveTrace

WAYS = (("batch", "sharded"), ("batch", "replicated"), ("vocab", "auto"), ("replicate", "auto"))


def compare(results, script: Script) -> None:
    """All ranks' steps against the oracle's; confidences only nearly, but the same on all."""
    for result in results:
        assert result == results[0]
    for got, wanted in zip(results[0], script.answers, strict=True):
        for name, value in wanted.items():
            if name == "confidences":
                assert np.allclose(got[name], value, rtol=0, atol=4e-7), name
            else:
                assert got[name] == value, name


def test_scripts_are_worth_testing():
    """Catches scripts whose drafts are never accepted or refused, and blocks that never end."""
    answers = Script(1, range(14), padding=1).answers
    sampled = [n for answer in answers for n in answer["num_sampled"]]
    assert {1, 2, 3, 4} <= set(sampled)
    blocks = [block for answer in answers for block in answer["drafts"]]
    assert sum(block[1:] == [-1, -1] for block in blocks) > 2
    assert sum(-1 not in block for block in blocks) > 20


@pytest.mark.parametrize(
    ("exchange", "loop"),
    [WAYS[0], WAYS[2], *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS[1::2])],
)
def test_every_batch_size(ranks, exchange, loop):
    """Catches a row, a token before, a draft row or a slot that is another request's."""
    script = Script(2, range(3 * ranks.size + 2), padding=1)
    compare(ranks.run(play, script, exchange, loop), script)


KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "float16": {"dtype": torch.float16, "padding": 3},
    "fewer ids than ranks": {"V": 3, "K": 2},
    "one id": {"V": 1, "K": 2},
    "one factor, one step": {"r": 1, "K": 1},
    "many factors, long blocks": {"V": 50, "r": 70, "K": 7},
    "greedy": {"greedy": True},
    "no bias": {"w1": 0.0},
    "mighty bias": {"w1": 3e4, "dtype": torch.float16},
    "candidates": {"candidates": 4, "dtype": torch.float32},
    "tied candidates": {"candidates": 2, "V": 30},
    "all are candidates": {"candidates": 13},
    "edited": {"edited": True, "padding": 2},
    "edited candidates": {"edited": True, "candidates": 5, "dtype": torch.float32},
    "fewer ids": {"V": 20, "D": 7},
    "fewer ids, edited candidates": {
        "V": 20, "D": 9, "padding": 2, "candidates": 3, "edited": True,
    },
}  # fmt: skip


FAST_KINDS = ("fewer ids than ranks", "candidates", "edited", "fewer ids")


@lru_cache
def script_of(kind: str) -> Script:
    return Script(3 + list(KINDS).index(kind), (5, 1, 6), **KINDS[kind])


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in FAST_KINDS else pytest.mark.slow) for kind in KINDS],
)
def test_every_kind(ranks, kind):
    """Catches a bias, candidates or a map of ids that is right in some layouts only."""
    script = script_of(kind)
    for exchange, loop in WAYS[: 3 if script.map is None else 2]:
        compare(ranks.run(play, script, exchange, loop), script)


@worlds("cpu:2", "cpu:4", "cuda:2")
@pytest.mark.parametrize("padding", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_sharded_factors(ranks, padding):
    """Catches columns of w2 that are added to other columns of the logits."""
    script = Script(20, (5, 2, 9, 1, 6), padding=padding)
    compare(ranks.run(play, script, "vocab", "auto", sharded=True), script)
    compare(ranks.run(play, script, "auto", "auto", sharded=True), script)


@pytest.mark.parametrize(("exchange", "loop"), WAYS)
@worlds(*FEW_WORLDS)
def test_unwritten_rows_are_not_read(ranks, exchange, loop):
    """Catches rows of the cache that are read before this block wrote them: all are NaN."""
    script = Script(21, (5, 2, 9, 1, 6, 8))
    compare(ranks.run(play, script, exchange, loop, poison=True), script)


# --- the same drafts, step by step


def both(mesh, script: Script, exchange: str) -> list[list]:
    """Blocks of a head that adds nothing, and of a DraftSampler."""
    state, plain = (state_of(mesh, script, exchange) for _ in range(2))
    drafter, single = sampler_of(mesh, script, state, "sharded"), DraftSampler(plain)
    found = []
    for name, what in script.events:
        if name == "add":
            slot, params, prompt = what
            for each in (state, plain):
                each.add(slot, params, prompt_token_ids=prompt)
        elif name == "remove":
            for each in (state, plain):
                each.remove(what)
        elif what.slots:
            device = mesh.device_type
            plan = BatchSharder(plain).plan(what.slots)
            blocks = [
                single(shard_vocab(plan.select(what.base[:, k].to(device)), mesh), plan, step=k)
                for k in range(script.K)
            ]
            tokens = torch.stack(blocks, 1)
            plan = BatchSharder(state).plan(what.slots)
            logits = shard_vocab(plan.select(what.base.to(device)), mesh)
            hidden = plan.select(what.hidden.to(device))
            block = drafter(logits, plan, what.last, hidden).token_ids
            ended = (block < 0).cumsum(1) > 0
            found.append([block.tolist(), tokens.masked_fill(ended, -1).tolist()])
    return found


@pytest.mark.parametrize("exchange", ["batch", "vocab", "replicate"])
def test_without_a_bias_it_is_a_draft_sampler(ranks, exchange):
    """Catches other random numbers, positions or offsets than those of drafts one by one."""
    script = Script(22, (5, 2, 9), w1=0.0, edited=True)
    for found in ranks.run(both, script, exchange):
        for block, tokens in found:
            assert block == tokens


# --- what ranks say to each other, and what they hold


class Shapes(TorchDispatchMode):
    """Records the shapes of the rows that each step of the loop makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.dtensor_sample.markov.default:
            self.found.append(list(made.shape))
        return made


def watched(
    mesh, exchange: str, loop: str, full: bool, K: int
) -> tuple[list[str], list, list[str]]:
    """Kinds of the collectives of one block of 7 requests, and shapes: the cache, and rows made.

    And the collectives that the cost model counts.
    """
    script = Script(30, (7,), K=K, V=24)
    state, step = begun(mesh, script, exchange)
    drafter = sampler_of(mesh, script, state, loop, full_logits=full)
    plan = BatchSharder(state).plan(step.slots)
    with CollectiveTrace() as trace, Shapes() as shapes:
        draft(mesh, drafter, step, plan)
    kept = state.drafts.logits(exchange)
    assert kept is not None
    shape = shape_of(exchange == "batch", state.axis.size, [1] * 7, plan.owners)
    cost = cost_of_drafting(plan.exchange, shape, K, script.V, plan.filters, kept.dtype)
    kinds = [KINDS_OF[name] for name, *_ in trace.calls]
    return kinds, [list(kept.shape), *shapes.found], list(cost.collectives)


@worlds("cpu:1", "cpu:2", "cpu:4", "cuda:2")
@pytest.mark.parametrize("K", [1, 4])
def test_collectives_and_memory(ranks, K):
    """Catches a loop that talks, that does other owners' work, or that does so without being asked.

    The cache and the rows of a step are a P-th of all, but for whole requests or columns.
    """
    P, slots, V = ranks.size, 9, 24
    own, mine, columns = -(-7 // P), -(-slots // P), V // P
    cases = [
        # Exchange, loop, full logits: collectives, the cache, rows of a step.
        ("batch", "sharded", False, ["all_to_all", "all_gather"], [mine * K, 1, V], [own, V]),
        ("batch", "auto", False, ["all_to_all", "all_gather"], [mine * K, 1, V], [own, V]),
        ("batch", "replicated", False, ["all_gather"] * 2, [mine * K, 1, V], [P * own, V]),
        ("batch", "auto", True, ["all_gather"] * 2, [mine * K, 1, V], [P * own, V]),
        ("replicate", "auto", False, ["all_gather"] * 2, [slots * K, 1, V], [7, V]),
        ("vocab", "auto", False, None, [slots * K, 1, columns], [7, columns]),
    ]
    for exchange, loop, full, collectives, cache, rows in cases:
        for kinds, shapes, counted in ranks.run(watched, exchange, loop, full, K):
            if exchange != "batch" or collectives == ["all_to_all", "all_gather"]:
                assert counted == kinds
            if P == 1:
                assert kinds == []
            elif collectives is None:
                assert "all_to_all" not in kinds
                assert 3 * K + 1 <= len(kinds) <= 7 * K + 1
            else:
                assert kinds == collectives
            assert shapes == [cache, *[rows] * K]


def said_by(mesh, exchange: str, loop: str, size: int, whole: bool, **kwargs) -> list[str]:
    """What the log says of two blocks."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dtensor_sample")
    logger.addHandler(handler)
    say.cache_clear()
    try:
        script = Script(31, (size,))
        state, step = begun(mesh, script, exchange)
        drafter = sampler_of(mesh, script, state, loop, **kwargs)
        plan = BatchSharder(state).plan(step.slots)
        blocks = [draft(mesh, drafter, step, plan, whole=whole) for _ in range(2)]
        assert blocks[0].token_ids.tolist() == script.answers[0]["drafts"]
        assert blocks[1].token_ids.tolist() == script.answers[0]["drafts"]
        return said
    finally:
        logger.removeHandler(handler)


@worlds("cpu:1", "cpu:4", "cuda:2")
def test_it_says_why_every_rank_runs_the_loop(ranks):
    """Catches a loop that is replicated in silence, or a log that says so often or on all ranks."""
    cases: list[tuple[tuple, dict, str]] = [
        (("batch", "auto", 7, False), {}, ""),
        (("batch", "sharded", 2, True), {}, ""),
        (("batch", "replicated", 2, True), {}, ""),
        (("vocab", "auto", 2, True), {}, ""),
        (("batch", "auto", 0, False), {}, ""),
        (("replicate", "auto", 7, False), {}, "draft logits are kept on every rank"),
        (("batch", "auto", 7, False), {"full_logits": True}, "the drafter needs full logits"),
        (("batch", "auto", 7, True), {}, "draft_logits are not sharded over the vocabulary"),
        (("batch", "auto", 1, False), {}, ""),
    ]
    for args, kwargs, reason in cases:
        for rank, said in enumerate(ranks.run(said_by, *args, **kwargs)):
            if ranks.size == 1 or rank > 0 or not reason:
                assert said == []
            else:
                assert len(said) == 1
                assert said[0].startswith("the drafting loop runs on every rank: " + reason)


# --- what replicas that differ a little agree on


def noisy(mesh, exchange: str, loop: str) -> list:
    """Blocks of logits that differ in their last bits on each rank, and what follows from them."""
    rank, device = mesh.get_local_rank(), mesh.device_type
    noise = torch.Generator().manual_seed(rank)
    script = Script(32, (8, 8, 8))
    state = state_of(mesh, script, exchange)
    drafter, verifier = sampler_of(mesh, script, state, loop), RejectionSampler(state)
    for slot in range(8):
        state.add(slot, SamplingParams(temperature=(0.0, 1.0)[slot % 2]))
    results = []
    for _ in range(3):
        base, hidden, target = (
            (torch.ones(shape) + 1e-6 * torch.randn(shape, generator=noise)).to(device)
            for shape in ((8, script.K, script.V), (8, script.K, H), (8 * (script.K + 1), script.V))
        )
        plan = BatchSharder(state).plan(range(8))
        logits = replicated(plan.select(base), mesh)
        tokens, told = drafter(logits, plan, [1] * 8, plan.select(hidden))
        plan = BatchSharder(state).plan(range(8), [script.K + 1] * 8)
        output = verifier(replicated(plan.select(target), mesh), plan, tokens)
        assert told is not None
        results.append([tokens.tolist(), told.tolist(), output.token_ids.tolist()])
    return results


@worlds("cpu:4", "cuda:2")
@pytest.mark.parametrize(("exchange", "loop"), WAYS)
def test_noise_between_ranks_does_not_show(ranks, exchange, loop):
    """Catches ranks that each go on from a token of their own."""
    first, *others = ranks.run(noisy, exchange, loop)
    assert all(other == first for other in others)

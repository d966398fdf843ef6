"""Blocks drafted left to right: the oracle's tokens, wherever the loop runs."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_sample import BatchSharder, DraftSampler
from tests.batches import shard_vocab
from tests.drafting import Script, play, sampler_of, state_of
from tests.pool import FEW_WORLDS, worlds

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


@pytest.mark.parametrize(("exchange", "loop"), WAYS)
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


@lru_cache
def script_of(kind: str) -> Script:
    return Script(3 + list(KINDS).index(kind), (5, 1, 6), **KINDS[kind])


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(ranks, kind):
    """Catches a bias, candidates or a map of ids that is right in some layouts only."""
    script = script_of(kind)
    for exchange, loop in WAYS[: 3 if script.map is None else 2]:
        compare(ranks.run(play, script, exchange, loop), script)


@worlds("cpu:2", "cpu:4", "cuda:2")
@pytest.mark.parametrize("padding", [0, 3])
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

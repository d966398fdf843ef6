"""Edited values: against the oracle at the ends of what floats can be, and against transformers."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_sample import (
    BatchSharder,
    Sampler,
    SamplingParams,
    SamplingState,
    logprobs,
    ops,
    sample,
)
from tests import oracle
from tests.batches import DTYPES, EXCHANGES, shard_vocab
from tests.pool import worlds

pytestmark = pytest.mark.slow

INF = math.inf


def values_of(
    mesh,
    logits: torch.Tensor,
    asked: list[dict[str, Any]],
    texts: list[tuple[list[int], list[int]]],
) -> np.ndarray:
    """[B, V] the values of rows of logits, each of its own request with a prompt and an output."""
    B, V = logits.shape
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=B, exchange="replicate", seed=0)
    for slot, (own, (prompt, output)) in enumerate(zip(asked, texts, strict=True)):
        state.add(slot, SamplingParams(**own), prompt_token_ids=prompt, output_token_ids=output)
    plan = BatchSharder(state).plan(range(B))
    full = plan.select(logits.to(mesh.device_type))
    rows = Sampler(state).exchange(shard_vocab(full, mesh), plan)
    return ops.copy(*rows, V).flatten(1)[:, :V].cpu().numpy()


EXTREMES = [INF, -INF, math.nan, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 1.5, -1.5, 65504.0]
ASKED: list[dict[str, Any]] = [
    {},
    {"logit_bias": dict.fromkeys(range(12), 3e38)},
    {"logit_bias": dict.fromkeys(range(12), -3e38), "repetition_penalty": 100.0},
    {"logit_bias": {0: -INF, 2: 5.0, 4: 1.0}, "presence_penalty": 0.1},
    {"repetition_penalty": 0.01, "frequency_penalty": 100.0},
    {"repetition_penalty": 0.01, "presence_penalty": -100.0, "frequency_penalty": -100.0},
    {"repetition_penalty": 1 / 3, "presence_penalty": 0.1, "frequency_penalty": 0.7},
    {"allowed_token_ids": [0, 2, 3], "logit_bias": {0: -1.5, 1: 99.0}},
    {"bad_words_ids": [[0], [5, 3], [9, 9, 1], [5, 9, 9, 7], [9, 9, 5, 9, 9, 8]]},
    {"min_tokens": 4, "stop_token_ids": [3, 9], "repetition_penalty": 1.1},
    {"min_tokens": 3, "stop_token_ids": [3, 9], "frequency_penalty": 1.1},
]


@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_at_the_ends(ranks, dtype):
    """Catches overflow that bans or wins, -0, NaN that a bias revives, two roundings in one."""
    rows = torch.tensor([EXTREMES] * len(ASKED), dtype=torch.float64).to(dtype)
    prompt, output = [0, 3, 7], [9, 5, 9, 9]
    texts = [(prompt, output[: 4 if i != 9 else 3]) for i in range(len(ASKED))]
    largest = torch.finfo(dtype).max
    for got in ranks.run(values_of, rows, ASKED, texts):
        for own, row, asked, text in zip(got, rows.float().numpy(), ASKED, texts, strict=True):
            clean, _ = oracle.clean(row, 12, largest)
            wanted = oracle.process(clean, SamplingParams(**asked), *text)
            # The same bits, signs of zeros among them.
            assert own.view(np.int32).tolist() == (wanted + 0).view(np.int32).tolist(), asked
    finite = got[1][[0, 3, 7]]
    assert np.isfinite(finite).all()
    assert got[3][2] == -INF  # a NaN with a bias
    assert got[3][0] == -INF  # a bias of -inf on +inf


def by_transformers(logits: torch.Tensor, asked: dict[str, Any], text: list[int], prompt: int):
    """[V] what the processors of transformers make of a row."""
    from transformers import generation

    row, ids = logits[None].float(), torch.tensor([text])
    biases = {(i,): bias for i, bias in asked.get("logit_bias", {}).items()}
    if biases:
        row = generation.SequenceBiasLogitsProcessor(biases)(ids, row)
    if "repetition_penalty" in asked:
        penalty = asked["repetition_penalty"]
        row = generation.RepetitionPenaltyLogitsProcessor(penalty)(ids, row)
    if "bad_words_ids" in asked:
        row = generation.NoBadWordsLogitsProcessor(asked["bad_words_ids"])(ids, row)
    if "min_tokens" in asked:
        args = (prompt, asked["min_tokens"], asked["stop_token_ids"])
        row = generation.MinNewTokensLengthLogitsProcessor(*args)(ids, row)
    return row[0].numpy()


COMPARED: list[dict[str, Any]] = [
    {"logit_bias": {3: 1.25, 8: -0.7}},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "logit_bias": {2: 4.0}},
    {"bad_words_ids": [[4], [1, 2], [2, 9], [9, 2, 5], [7, 7]]},
    {"min_tokens": 5, "stop_token_ids": [0, 6]},
    {"min_tokens": 2, "stop_token_ids": [0, 6]},
    {"repetition_penalty": 1.7, "bad_words_ids": [[2, 0]], "min_tokens": 9, "stop_token_ids": [3]},
]


@worlds("cpu:1")
def test_values_are_those_of_transformers(ranks):
    """Where definitions agree, so do the bits: docs/compatibility.md lists where they do not."""
    logits = torch.randn(len(COMPARED), 13, generator=torch.Generator().manual_seed(4)) * 3
    texts = [([1, 5, 9], [2, 9, 2])] * len(COMPARED)
    got = ranks.run(values_of, logits, COMPARED, texts)[0]
    for own, row, asked, (prompt, output) in zip(got, logits, COMPARED, texts, strict=True):
        wanted = by_transformers(row, asked, prompt + output, len(prompt))
        assert own.tolist() == wanted.tolist(), asked


def padded_tokens(mesh, exchange: str, asked: dict[str, Any]) -> list[int]:
    """Tokens of rows of -5 whose vocabulary of 10 is padded to 12 by zeros."""
    B = 40
    state = SamplingState(mesh, vocab_size=10, max_num_reqs=B, exchange=exchange, seed=0)
    for slot in range(B):
        state.add(slot, SamplingParams(top_k=200, **asked), prompt_token_ids=[9], position=slot)
    plan = BatchSharder(state).plan(range(B))
    rows = torch.full((B, 12), -5.0, device=mesh.device_type)
    rows[:, 10:] = 0.0
    output = Sampler(state)(shard_vocab(plan.select(rows), mesh), plan)
    return output.token_ids[:, 0].tolist()


@worlds("cpu:4", "cuda:2")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_padded_vocabulary(ranks, exchange):
    """Catches padding that an edit makes likely, or that takes the place of an id."""
    for asked in ({}, {"presence_penalty": 1.0}, {"logit_bias": {9: 3.0, 0: -INF}}):
        for got in ranks.run(padded_tokens, exchange, asked):
            assert max(got) <= 9
            assert min(got) >= (1 if "logit_bias" in asked else 0)
            assert len(set(got)) > 2
    assert set(ranks.run(padded_tokens, exchange, {"allowed_token_ids": [9]})[0]) == {9}


def bad_values(mesh, exchange: str) -> tuple[list[int], list[int], list[bool]]:
    """Tokens, NaN counts and failures of rows with a NaN or +inf somewhere, under penalties."""
    rows = torch.zeros(7, 37)
    for row, at in ((0, 0), (1, 18), (2, 36)):
        rows[row, at] = torch.nan
    rows[3] = torch.nan
    rows[4, 5] = INF
    rows[5, [5, 30]], rows[5, 6] = INF, torch.nan
    rows[6] = -INF
    state = SamplingState(mesh, vocab_size=37, max_num_reqs=7, exchange=exchange, seed=0)
    for slot in range(7):
        asked: dict[str, Any] = {"logit_bias": {0: 9.0, 18: 9.0, 36: 9.0}}
        params = SamplingParams(temperature=0.0, presence_penalty=1.0, **asked)
        state.add(slot, params, output_token_ids=[5])
    plan = BatchSharder(state).plan(range(7))
    logits = shard_vocab(plan.select(rows.to(mesh.device_type)), mesh)
    output = Sampler(state)(logits, plan)
    return output.token_ids[:, 0].tolist(), output.num_nans.tolist(), output.failed.tolist()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_bad_values(ranks, exchange):
    """Catches a NaN that a bias revives or hides, and rows that spoil others."""
    # Rows 0 to 2 prefer ids 0, 18, 36 but for their own NaN; +inf is the largest finite value.
    wanted = ([18, 0, 0, -1, 5, 5, -1], [1, 1, 1, 37, 0, 1, 0], [i in (3, 6) for i in range(7)])
    for got in ranks.run(bad_values, exchange):
        assert got == wanted


def told(mesh, exchange: str, mode: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens under biases and penalties, what is told of them, and raw log-probabilities."""
    B, V = 20, 23
    state = SamplingState(
        mesh, vocab_size=V, max_num_reqs=B, exchange=exchange, logprobs_mode=mode, seed=0
    )
    for slot in range(B):
        params = SamplingParams(logprobs=0, logit_bias=TOLD_BIAS, presence_penalty=1.5)
        state.add(slot, params, output_token_ids=[1, 2, 3])
    plan = BatchSharder(state).plan(range(B))
    rows = torch.randn(B, V, generator=torch.Generator().manual_seed(9)).to(mesh.device_type)
    output = Sampler(state)(shard_vocab(plan.select(rows), mesh), plan)
    assert output.logprobs is not None
    raw = logprobs(shard_vocab(rows, mesh), output.token_ids[:, 0])
    return output.token_ids[:, 0].cpu(), output.logprobs.token_logprobs[:, 0].cpu(), raw.cpu()


TOLD_BIAS = {4: 3.0, 5: -2.0, 6: -INF}


@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize("exchange", ["batch", "vocab"])
def test_what_is_told_of_edited_rows(ranks, exchange):
    """Catches raw log-probabilities of edited values, and processed ones of raw values."""
    tokens, found, raw = ranks.run(told, exchange, "raw_logprobs")[0]
    assert torch.equal(found, raw)
    tokens, found, raw = ranks.run(told, exchange, "processed_logprobs")[0]
    rows = torch.randn(20, 23, generator=torch.Generator().manual_seed(9)).double()
    for i, bias in TOLD_BIAS.items():
        rows[:, i] += bias
    rows[:, [1, 2, 3]] -= 1.5
    wanted = rows.log_softmax(1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)
    assert not torch.equal(found, raw)


def refusals(mesh) -> list[str]:
    """What is said to requests that cannot be admitted; the rest of the engine goes on."""
    state = SamplingState(mesh, vocab_size=11, max_num_reqs=3, seed=0)
    state.add(0, SamplingParams(temperature=0, logit_bias={4: 9.0}))
    said = []
    for asked in (
        {"logit_bias": {11: 1.0}},
        {"allowed_token_ids": [3, 12]},
        {"bad_words_ids": [[1], [2, 11]]},
        {"stop_token_ids": [99]},
    ):
        try:
            state.add(1, SamplingParams(**asked))
        except ValueError as refused:
            said.append(str(refused))
    try:
        state.add(1, SamplingParams(), output_token_ids=[11])
    except ValueError as refused:
        said.append(str(refused))
    state.add(1, SamplingParams(temperature=0, allowed_token_ids=[7]))
    plan = BatchSharder(state).plan([1, 0])
    rows = shard_vocab(plan.select(torch.zeros(2, 11, device=mesh.device_type)), mesh)
    assert Sampler(state)(rows, plan).token_ids[:, 0].tolist() == [7, 4]
    # What is kept lies under one exchange.
    for exchange in ("vocab", "replicate"):
        try:
            BatchSharder(state).plan([0], exchange=exchange)
        except ValueError as refused:
            said.append(str(refused))
    try:
        full = shard_vocab(torch.zeros(1, 11, device=mesh.device_type), mesh)
        sample(full, SamplingParams(presence_penalty=1), position=0)
    except ValueError as refused:
        said.append(str(refused))
    return said


@worlds("cpu:2", "cuda:2")
def test_refusals(ranks):
    """Catches a request that is admitted and then ignored or fails, and takes others with it."""
    wanted = (
        "logit_bias must be ids in [0, 10], got 11",
        "allowed_token_ids must be ids in [0, 10], got 12",
        "bad_words_ids must be ids in [0, 10], got 11",
        "stop_token_ids must be ids in [0, 10], got 99",
        "output_token_ids[0] must be an integer in [0, 10], got 11",
        'exchange must be "batch", under which biases and counts are kept, got "vocab" for slot 0',
        'exchange must be "batch", under which biases and counts are kept, got "replicate" for',
        "penalty, bad words or min_tokens, which need a SamplingState, got presence_penalty=1.0",
    )
    for said in ranks.run(refusals):
        assert len(said) == len(wanted)
        for text, part in zip(said, wanted, strict=True):
            assert part in text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": 3}, "logit_bias must map ids to numbers, got 3"),
    ({"logit_bias": {-1: 1.0}}, "an id of logit_bias must be an integer in .*, got -1"),
    ({"logit_bias": {1: INF}}, "logit_bias\\[1\\] must be a number in"),
    ({"logit_bias": {1: math.nan}}, "logit_bias\\[1\\] must be a number in"),
    ({"logit_bias": {1: 1e39}}, "logit_bias\\[1\\] must be a number in"),
    ({"logit_bias": [(1, 2.0), (1, 3.0)]}, "each id once, got 1 more than once"),
    ({"logit_bias": [(1, 2.0, 3)]}, "logit_bias must map ids to numbers"),
    ({"allowed_token_ids": []}, "allowed_token_ids must have at least one id or be None"),
    ({"allowed_token_ids": "12"}, "allowed_token_ids must be a sequence of integers"),
    ({"repetition_penalty": 0}, "repetition_penalty must be a number in \\[0.01, 100\\], got 0"),
    ({"repetition_penalty": None}, "repetition_penalty must be a number"),
    ({"presence_penalty": 101}, "presence_penalty must be a number in \\[-100, 100\\], got 101"),
    (
        {"frequency_penalty": -INF},
        "frequency_penalty must be a number in \\[-100, 100\\], got -inf",
    ),
    ({"bad_words_ids": [1]}, "bad_words_ids\\[0\\] must be a sequence of integers, got 1"),
    ({"bad_words_ids": [[1], []]}, "bad_words_ids\\[1\\] must have 1 to 64 ids, got 0"),
    ({"bad_words_ids": [[1] * 65]}, "bad_words_ids\\[0\\] must have 1 to 64 ids, got 65"),
    ({"bad_words_ids": [[1, 2]] * 1025}, "at most 1024 words of more than one id, got 1025"),
    ({"min_tokens": -1, "stop_token_ids": [1]}, "min_tokens must be an integer"),
    ({"min_tokens": 2}, "stop_token_ids must be given with min_tokens = 2, got none"),
    ({"stop_token_ids": range(65)}, "stop_token_ids must be at most 64 ids, got 65"),
]


@pytest.mark.parametrize(("asked", "message"), REFUSED, ids=str)
def test_refused_when_made(asked, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**asked)


def test_params_keep_what_they_are_given():
    """Catches a field that changes when params are copied, and mutable ones that are shared."""
    words = [[1, 2], [3]]
    params = SamplingParams(
        logit_bias={5: 1.0, 2: -INF}, bad_words_ids=words, allowed_token_ids=[1], seed=1
    )
    words[0].append(9)
    assert params.logit_bias == ((2, -INF), (5, 1.0))
    assert params.bad_words_ids == ((1, 2), (3,))
    half: Any = {1: np.float32(-INF)}
    assert SamplingParams(logit_bias=half).logit_bias == ((1, -INF),)
    copy = params.spawn(1)[0]
    assert (copy.logit_bias, copy.bad_words_ids) == (params.logit_bias, params.bad_words_ids)
    assert hash(copy) == hash(params.spawn(1)[0])
    assert SamplingParams(stop_token_ids=[1]).needs.edited is False

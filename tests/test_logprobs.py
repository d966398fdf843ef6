"""Log-probabilities of tokens: exact enough, and the same bits everywhere."""

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from dtensor_sample import (
    BatchSharder,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    logprobs,
    replicated,
    sample,
    sample_with_logprobs,
)
from tests.batches import EXCHANGES, shard_vocab
from tests.pool import worlds

V, ROWS = 1003, 7
WORLDS = ("cpu:1", "cpu:2", "cpu:4", "cuda:1", "cuda:2")


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Some spread, one flat, one peaked, one masked, one with NaN and +inf, one without tokens."""
    x = torch.randn(ROWS, V, generator=torch.Generator().manual_seed(3)) * 3
    x[1] = -70.0
    x[2, 5] = 60.0
    x[3, 10:] = -torch.inf
    x[4, 7], x[4, 9] = torch.nan, torch.inf
    x[5] = -torch.inf
    return x.to(dtype)


def ids() -> torch.Tensor:
    """Three of each row: somewhere, the last one, and one that does not exist."""
    some = torch.randint(0, V, (ROWS,), generator=torch.Generator().manual_seed(4))
    some[3], some[4] = 3, 9
    return torch.stack([some, torch.full((ROWS,), V - 1), torch.full((ROWS,), -1)], 1)


def exact(x: torch.Tensor, vocab_size: int = V) -> torch.Tensor:
    """By float64 log_softmax, with NaN and +inf as they count."""
    top = torch.finfo(x.dtype).max
    clean = x.double()[:, :vocab_size].clamp(max=top)
    found = clean.masked_fill(clean.isnan(), -math.inf).log_softmax(-1)
    return found.masked_fill(found.isnan(), -math.inf)  # a row without tokens


def placed(x: torch.Tensor, mesh, placement: str) -> DTensor:
    """Logits as replicas, or sharded over "columns" or "rows"."""
    if placement == "whole":
        return replicated(x, mesh)
    return shard_vocab(x, mesh, dim=0 if placement == "rows" else -1)


PLACEMENTS = ("columns", "rows", "whole")


def found(mesh, dtype: torch.dtype, vocab_size: int, placement: str) -> torch.Tensor:
    logits = placed(rows(dtype).to(mesh.device_type), mesh, placement)
    return logprobs(logits, ids().to(mesh.device_type), vocab_size=vocab_size)


@worlds(*WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [V, 500])
def test_against_float64(ranks, dtype, vocab_size):
    """Catches a lost tail, a shard left out, padding that counts, and other bits on other ranks."""
    results = [
        result
        for placement in PLACEMENTS
        for result in ranks.run(found, dtype, vocab_size, placement)
    ]
    assert all(torch.equal(result, results[0]) for result in results)
    wanted = exact(rows(dtype), vocab_size)
    for i, own in enumerate(ids().tolist()):
        for j, token in enumerate(own):
            value = wanted[i, token].item() if 0 <= token < vocab_size else -math.inf
            assert results[0][i, j].item() == pytest.approx(value, rel=1e-6, abs=1e-6)


def at_temperature(mesh, placement: str, temperature: float) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, their gradient, and what a sampler tells of a request of no filters."""
    x = rows()[[0, 1, 2, 3, 6]].to(mesh.device_type)
    logits = placed(x, mesh, placement)
    logits.requires_grad_()
    chosen = ids()[[0, 1, 2, 3, 6]].to(mesh.device_type)
    found = logprobs(logits, chosen, temperature=temperature)
    weight = torch.arange(1.0, 16, device=mesh.device_type).view(5, 3)
    (found.clamp(min=-1e4) * weight).sum().backward()
    assert isinstance(logits.grad, DTensor)
    state = SamplingState(
        mesh, vocab_size=V, max_num_reqs=5, seed=0, logprobs_mode="processed_logprobs"
    )
    for slot in range(5):
        state.add(slot, SamplingParams(temperature=temperature, logprobs=0))
    plan = BatchSharder(state).plan(range(5))
    output = Sampler(state)(shard_vocab(plan.select(x), mesh), plan)
    assert output.logprobs is not None
    again = logprobs(placed(x, mesh, placement), output.token_ids, temperature=temperature)
    assert torch.equal(again, output.logprobs.token_logprobs)
    return found.detach(), logits.grad.full_tensor()


@worlds("cpu:4", "cuda:2")
@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_at_a_temperature(ranks, temperature):
    """Catches a temperature that reaches the values and not their gradient, or rounds."""
    x = rows()[[0, 1, 2, 3, 6]].double().requires_grad_()
    chosen = ids()[[0, 1, 2, 3, 6]]
    own = (x / temperature).log_softmax(-1).gather(1, chosen.clamp(min=0))
    wanted = own.masked_fill(chosen < 0, -math.inf)
    weight = torch.arange(1.0, 16).view(5, 3)
    (own.clamp(min=-1e4) * weight * (chosen >= 0)).sum().backward()
    results = [r for p in PLACEMENTS for r in ranks.run(at_temperature, p, temperature)]
    for values, gradient in results:
        assert torch.equal(values, results[0][0])
        torch.testing.assert_close(values.double(), wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient.double(), x.grad, rtol=1e-2, atol=1e-5)


def few(mesh, size: int) -> torch.Tensor:
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(size))
    logits = shard_vocab(x.to(mesh.device_type), mesh)
    return logprobs(logits, torch.arange(size, device=mesh.device_type).expand(2, -1))


@worlds("cpu:4")
@pytest.mark.parametrize("size", [1, 3, 5])
def test_fewer_ids_than_ranks(ranks, size):
    for result in ranks.run(few, size):
        x = torch.randn(2, size, generator=torch.Generator().manual_seed(size))
        torch.testing.assert_close(result, x.double().log_softmax(-1).float())


def gradient_of_few(mesh, size: int, count: int, placement: str) -> torch.Tensor:
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(size))[:count]
    logits = placed(x.to(mesh.device_type), mesh, placement)
    logits.requires_grad_()
    ids = torch.zeros(count, dtype=torch.int64, device=mesh.device_type)
    logprobs(logits, ids).sum().backward()
    assert isinstance(logits.grad, DTensor)
    return logits.grad.full_tensor()


@worlds("cpu:4")
@pytest.mark.parametrize(("size", "count"), [(1, 2), (3, 2), (5, 0)])
@pytest.mark.parametrize("placement", PLACEMENTS[:2])
def test_gradients_where_some_ranks_have_no_columns_or_rows(ranks, size, count, placement):
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(size))[:count]
    x.requires_grad_()
    x.log_softmax(-1)[:, 0].sum().backward()
    for result in ranks.run(gradient_of_few, size, count, placement):
        torch.testing.assert_close(result, x.grad)


def gradients(mesh, dtype: torch.dtype, placement: str) -> torch.Tensor:
    x = rows(dtype)[[0, 1, 2, 3, 6]].to(mesh.device_type)
    logits = placed(x, mesh, placement)
    logits.requires_grad_()
    chosen = ids()[[0, 1, 2, 3, 6]].to(mesh.device_type)
    weight = torch.arange(1.0, 16, device=mesh.device_type).view(5, 3)
    (logprobs(logits, chosen).clamp(min=-1e4) * weight).sum().backward()
    assert isinstance(logits.grad, DTensor)
    return logits.grad.full_tensor()


@worlds("cpu:1", "cpu:4", "cuda:2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients(ranks, dtype, placement):
    """Catches a softmax over one shard, a wrong sign, and gradients of ids that do not exist."""
    x = rows(dtype)[[0, 1, 2, 3, 6]].double().requires_grad_()
    chosen = ids()[[0, 1, 2, 3, 6]]
    own = x.log_softmax(-1).gather(1, chosen.clamp(min=0)).clamp(min=-1e4)
    weight = torch.arange(1.0, 16).view(5, 3)
    (own * weight * (chosen >= 0)).sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 0.2
    for result in ranks.run(gradients, dtype, placement):
        torch.testing.assert_close(result.double(), x.grad, rtol=1e-2, atol=tolerance)


def crossed(mesh, placement: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a batch of sequences, and what cross_entropy makes of them."""
    x = torch.randn(3, 4, V, generator=torch.Generator().manual_seed(9)).to(mesh.device_type) * 4
    ids = torch.arange(12, device=mesh.device_type).view(3, 4) * 77
    entropy = torch.nn.functional.cross_entropy(x.flatten(0, 1), ids.flatten(), reduction="none")
    return logprobs(placed(x, mesh, placement), ids), -entropy.view(3, 4)


@worlds("cpu:1", "cpu:2", "cpu:4", "cuda:2")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_near_cross_entropy(ranks, placement):
    """Catches rows of sequences that are taken for one another."""
    for got, wanted in ranks.run(crossed, placement):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def told_by_samplers(mesh, exchange: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What samplers tell of tokens, and `logprobs` of the logits that decided about them."""
    x = rows(torch.bfloat16).to(mesh.device_type)
    K = 2
    state = SamplingState(
        mesh, vocab_size=V, max_num_reqs=ROWS, num_speculative_tokens=K, exchange=exchange, seed=0
    )
    for slot in range(ROWS):
        asks = SamplingParams(temperature=(0.7, 0)[slot == 3], top_p=0.9, seed=slot, logprobs=0)
        state.add(slot, asks)
    sharder, results = BatchSharder(state), []
    for drafts in ([], x.float().nan_to_num(-torch.inf).argmax(-1)[:, None].tolist()):
        plan = sharder.plan(range(ROWS), [1 + len(drafts[:1])] * ROWS)
        hidden = x.repeat_interleave(1 + len(drafts[:1]), 0)
        logits = shard_vocab(plan.select(hidden), mesh)
        if drafts:
            output = RejectionSampler(state)(logits, plan, drafts)
        else:
            output = Sampler(state)(logits, plan)
        assert output.logprobs is not None
        for placement in PLACEMENTS:
            trainer = logprobs(placed(x, mesh, placement), output.token_ids)
            results.append((output.logprobs.token_logprobs, trainer))
        assert (output.num_sampled > 1).any() == bool(drafts)
    return results


@worlds("cpu:1", "cpu:2", "cpu:4", "cuda:1", "cuda:2")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_samplers_and_trainers_agree(ranks, exchange):
    """Catches a mismatch, of one bit, between what an engine tells and what a trainer computes."""
    for results in ranks.run(told_by_samplers, exchange):
        for told, trainer in results:
            assert torch.equal(told, trainer)
            assert told.isfinite().sum() >= ROWS - 1


def rollout(mesh) -> tuple[list, ...]:
    x = rows().to(mesh.device_type)
    logits = shard_vocab(x, mesh)
    params = [SamplingParams(temperature=0.7, top_p=0.9, seed=i) for i in range(ROWS)]
    tokens, own = sample_with_logprobs(logits, params, position=4)
    again = logprobs(replicated(x, mesh), tokens)
    alone = sample(logits, params, position=4)
    return tokens.tolist(), own.tolist(), again.tolist(), alone.tolist()


@worlds("cpu:1", "cpu:4", "cuda:2")
def test_rollout_and_trainer_agree(ranks):
    """Catches a sampler and a trainer that compute two different log-probabilities."""
    for tokens, own, again, alone in ranks.run(rollout):
        assert tokens == alone
        assert own == again
        assert tokens[5] == -1
        assert own[5] == -math.inf
        assert all(math.isfinite(value) for i, value in enumerate(own) if i != 5)


def refusals(mesh) -> list[str]:
    logits = shard_vocab(rows().to(mesh.device_type), mesh)
    good = ids().to(mesh.device_type)
    bad_ones: list[Any] = [good.float(), good[:3], good[None], good.tolist()]
    messages = []
    for bad in (*bad_ones, replicated(good, mesh)):
        try:
            logprobs(logits, bad)
        except ValueError as error:
            messages.append(str(error))
        assert logprobs(logits, good).shape == good.shape
    return messages


@worlds("cpu:2")
def test_refusals(ranks):
    wanted = ["int64", "shape", "shape", "plain tensor", "plain tensor"]
    for messages in ranks.run(refusals):
        assert len(messages) == len(wanted)
        for message, part in zip(messages, wanted, strict=True):
            assert message.startswith("ids must ")
            assert part in message

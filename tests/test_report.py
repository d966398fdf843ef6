"""What is told of emitted tokens: right by definition, and the same bits in every layout."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dtensor_sample import (
    BatchSharder,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
)
from dtensor_sample.output import TokenLogprobs
from tests import oracle
from tests.batches import (
    EXCHANGES,
    Batch,
    Layout,
    library_weights,
    random_batch,
    shard_vocab,
)
from tests.pool import Pools, Ranks, World, worlds
from tests.speculation import Speculation, random_speculation, speculative_output
from tests.test_collectives import KINDS, CollectiveTrace
from tests.test_draft_collectives import sent_bytes

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
Told = dict[str, torch.Tensor] | None


def asking(rng: np.random.Generator, params: SamplingParams, V: int) -> SamplingParams:
    """Params that ask for anything: one of four requests for nothing."""
    if rng.random() < 0.25:
        return params
    return replace(
        params,
        logprobs=[None, 0, 1, 3, V, V + 5][rng.integers(6)],
        logprob_token_ids=tuple(rng.integers(V, size=rng.integers(4)).tolist()),
        kept_capacity=int(rng.choice([0, 1, 3, V, V + 2])),
        entropy=bool(rng.random() < 0.5),
    )


def asking_batch(seed: int, size: int, V: int, **kwargs: Any) -> Batch:
    batch, rng = random_batch(seed, size, V, **kwargs), np.random.default_rng(seed)
    return replace(batch, params=[asking(rng, p, V) for p in batch.params])


def told_step(mesh, batch: Batch, layout: Layout, mode: str) -> tuple[torch.Tensor, Told]:
    """Token ids and what is told of them in one step of an engine."""
    slots = range(len(batch)) if layout.slots is None else layout.slots
    order = list(range(len(batch)) if layout.order is None else layout.order)
    state = SamplingState(
        mesh,
        vocab_size=batch.vocab_size,
        max_num_reqs=max(slots, default=0) + 1,
        logprobs_mode=mode,
        seed=batch.base_seed,
    )
    for slot, params, position in zip(slots, batch.params, batch.positions, strict=True):
        state.add(slot, params, position=position)
    sharder = BatchSharder(state, owners=layout.owners)
    chosen = [slots[i] for i in order]
    plan = sharder.plan(chosen, exchange=layout.exchange)
    if layout.spare:
        plan = sharder.plan(chosen, exchange=layout.exchange, capacity=plan.capacity + layout.spare)
    hidden = batch.logits[order].to(mesh.device_type)
    output = Sampler(state, compile=layout.compile)(shard_vocab(plan.select(hidden), mesh), plan)
    return output.token_ids, tensors(output.logprobs)


def tensors(told: TokenLogprobs | None) -> Told:
    """The fields, floats by their bits."""
    if told is None:
        return None
    found = {field.name: getattr(told, field.name) for field in fields(told)}
    return {k: x.view(torch.int32) if x.is_floating_point() else x for k, x in found.items()}


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.float32)


def close(got: float, wanted: float) -> bool:
    """Within 1e-5, relative to the larger of 1 and the wanted value."""
    return got == wanted or abs(got - wanted) <= 1e-5 * max(1.0, abs(wanted))


def check_entry(
    told: Told,
    at: tuple[int, int],
    token: int,
    row: torch.Tensor,
    params: SamplingParams,
    mode: str,
    V: int,
) -> None:
    """One entry of what was told against the oracle."""
    assert told is not None
    own = {name: x[at] for name, x in told.items()}
    ids, top = own["top_ids"].tolist(), floats(own["top_logprobs"]).tolist()
    given = floats(own["given_logprobs"]).tolist()
    kept_ids, kept = own["kept_ids"].tolist(), floats(own["kept_logprobs"]).tolist()
    shown, entropy = floats(own["token_logprobs"]).item(), floats(own["entropy"]).item()
    if token < 0 or not params.wants.logprobs:
        assert shown == entropy == -math.inf
        assert own["ranks"] == own["num_kept"] == 0
        assert not own["kept_overflow"]
        assert {*ids, *kept_ids} <= {-1}
        assert {*top, *given, *kept} <= {-math.inf}
        return
    wanted = oracle.tell(
        row.float().numpy(),
        token,
        params,
        mode=mode,
        vocab_size=V,
        largest=torch.finfo(row.dtype).max,
        weights=library_weights,
    )
    assert close(shown, wanted.token), (shown, wanted)
    assert own["ranks"] == wanted.rank
    assert [i for i in ids if i >= 0] == [i for i, _ in wanted.top]
    check_listed(ids, top, wanted.top)
    assert all(map(close, given, wanted.given)), (given, wanted.given)
    assert set(given[len(wanted.given) :]) <= {-math.inf}
    capacity = params.kept_capacity
    check_listed(kept_ids, kept, wanted.kept[:capacity])
    assert own["num_kept"] == (len(wanted.kept) if capacity else 0)
    assert own["kept_overflow"].item() == (0 < capacity < len(wanted.kept))
    assert close(entropy, wanted.entropy if params.entropy else -math.inf)


def check_listed(
    ids: Sequence[int], values: Sequence[float], wanted: Sequence[tuple[int, float]]
) -> None:
    count = len(wanted)
    assert list(ids) == [i for i, _ in wanted] + [-1] * (len(ids) - count)
    assert all(close(got, value) for got, (_, value) in zip(values, wanted, strict=False))
    assert set(values[count:]) <= {-math.inf}


def check_batch(batch: Batch, results: Any, mode: str) -> None:
    """Every rank's result against the oracle."""
    (token_ids, told), *others = results
    for other_ids, other in others:
        assert torch.equal(other_ids, token_ids)
        same(other, told)
    for i, params in enumerate(batch.params):
        token = int(token_ids[i, 0])
        check_entry(told, (i, 0), token, batch.logits[i], params, mode, batch.vocab_size)


def same(got: Told, wanted: Told) -> None:
    """Bit for bit."""
    if got is None or wanted is None:
        assert got is wanted
        return
    for name, bits in got.items():
        assert torch.equal(bits, wanted[name]), name


@worlds("cpu:1", "cpu:2", "cpu:4", "cuda:1", "cuda:2")
@pytest.mark.parametrize("mode", MODES)
def test_against_the_oracle(ranks, mode):
    """Catches a wrong row, mode, rank, tie or normaliser, and padding that counts."""
    for seed, (size, V) in enumerate([(9, 13), (5, 3), (3, 1), (11, 111)]):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        batch = asking_batch(seed, size, V, dtype=dtype, padding=3 * (seed % 2))
        exchange = EXCHANGES[(seed + MODES.index(mode)) % 3]
        results = ranks.run(told_step, batch, Layout(exchange=exchange), mode)
        check_batch(batch, results, mode)


LAYOUTS = [
    Layout(exchange=exchange, owners=owners, slots=slots, order=order, spare=spare)
    for exchange in EXCHANGES
    for owners, slots, order, spare in [
        ("balanced", None, None, 0),
        ("slot", [0, 4, 1, 8, 12, 5, 16], [6, 0, 2, 5, 4, 3, 1], 0),
        ("position", None, [3, 1, 5], 2 * (exchange == "batch")),
        ("slot", [0, 4, 8, 12, 16, 20, 24], None, 0),
    ]
]


def told_in_layouts(mesh, batch: Batch, mode: str) -> list[tuple[torch.Tensor, Told]]:
    return [told_step(mesh, batch, layout, mode) for layout in LAYOUTS]


def wide_batch(seed: int) -> Batch:
    """Seven requests of which one asks for most: all that is told is as wide in every layout."""
    batch = asking_batch(seed, 7, 37, dtype=torch.bfloat16, seeded=True)
    wide = replace(batch.params[3], logprobs=37, kept_capacity=37, logprob_token_ids=(1, 5, 0))
    return replace(batch, params=[*batch.params[:3], wide, *batch.params[4:]])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_everywhere(pools, device, mode):
    """Catches what an owner keeps to itself, results out of order, and float sums over shards."""
    batch = wide_batch(77)
    wanted_ids, wanted = pools_run(pools, f"{device}:1", told_step, batch, Layout(), mode)[0]
    assert wanted is not None
    sizes = (1, 2, 4) if device == "cpu" else (1, 2)
    for size in sizes:
        for rank in pools_run(pools, f"{device}:{size}", told_in_layouts, batch, mode):
            for layout, (token_ids, told) in zip(LAYOUTS, rank, strict=True):
                order = list(range(7)) if layout.order is None else list(layout.order)
                assert torch.equal(token_ids, wanted_ids[order])
                same(told, {name: bits[order] for name, bits in wanted.items()})


def pools_run(pools: Pools, world: str, body: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Run a body on a world of one's own choice."""
    chosen = World.parse(world)
    if chosen.device_type == "cuda" and torch.cuda.device_count() < chosen.size:
        pytest.skip(f"needs {chosen.size} CUDA devices, found {torch.cuda.device_count()}")
    return Ranks(pools, chosen).run(body, *args, **kwargs)


# --- verified rows


def asking_speculation(seed: int, size: int, V: int, K: int, **kwargs: Any) -> Speculation:
    step, rng = random_speculation(seed, size, V, K, **kwargs), np.random.default_rng(seed)
    requests = [replace(r, params=asking(rng, r.params, V)) for r in step.requests]
    return replace(step, requests=requests)


def verified(
    mesh, step: Speculation, layout: Layout, method: str, mode: str
) -> tuple[torch.Tensor, torch.Tensor, Told]:
    _, output = speculative_output(mesh, step, layout, method, mode)
    return output.token_ids, output.num_rejected, tensors(output.logprobs)


@pytest.mark.slow
@worlds("cpu:1", "cpu:4", "cuda:1", "cuda:2")
@pytest.mark.parametrize("mode", MODES)
def test_verified_rows_against_the_oracle(ranks, mode):
    """Catches the row of another place: accepted, recovered and bonus tokens each have their own.

    A recovered token is drawn from what the draft leaves of p; what is told of it is p.
    """
    V, K, method = 17, 3, ("standard", "block")[MODES.index(mode) % 2]
    kinds = dict.fromkeys(("accepted", "recovered", "bonus"), 0)
    for seed in range(2):
        step = asking_speculation(40 + seed, 24, V, K, padding=seed, dtype=torch.bfloat16)
        layout = Layout(exchange=EXCHANGES[(seed + MODES.index(mode)) % 3])
        (token_ids, rejected, told), *others = ranks.run(verified, step, layout, method, mode)
        for other_ids, _, other in others:
            assert torch.equal(other_ids, token_ids)
            same(other, told)
        for i, request in enumerate(step.requests):
            last = int((token_ids[i] >= 0).sum()) - 1
            for j in range(K + 1):
                token, row = int(token_ids[i, j]), request.target[min(j, request.k)]
                check_entry(told, (i, j), token, row, request.params, mode, V)
                if token >= 0 and request.params.wants.logprobs and request.k:
                    end = "recovered" if rejected[i] else "bonus"
                    kinds["accepted" if j < last else end] += 1
    assert min(kinds.values()) >= 5, kinds


def verified_in_layouts(
    mesh, step: Speculation, method: str, mode: str
) -> list[tuple[torch.Tensor, torch.Tensor, Told]]:
    return [verified(mesh, step, layout, method, mode) for layout in LAYOUTS]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("mode", "method"), [(MODES[0], "block"), (MODES[1], "standard")])
def test_the_same_bits_of_verified_rows(pools, device, mode, method):
    step = asking_speculation(9, 7, 37, 3, dtype=torch.float16)
    first = replace(step.requests[5].params, logprobs=37, kept_capacity=37, seed=4)
    requests = [
        replace(r, params=replace(first if i == 5 else r.params, seed=i))
        for i, r in enumerate(step.requests)
    ]
    step = replace(step, requests=requests)
    run = (verified, step, Layout(), method, mode)
    wanted_ids, wanted_rejected, wanted = pools_run(pools, f"{device}:1", *run)[0]
    assert wanted is not None
    for size in (1, 2, 4) if device == "cpu" else (1, 2):
        results = pools_run(pools, f"{device}:{size}", verified_in_layouts, step, method, mode)
        for rank in results:
            for layout, (token_ids, rejected, told) in zip(LAYOUTS, rank, strict=True):
                order = list(range(7)) if layout.order is None else list(layout.order)
                assert torch.equal(token_ids, wanted_ids[order])
                assert torch.equal(rejected, wanted_rejected[order])
                width = min(told["given_logprobs"].shape[2], wanted["given_logprobs"].shape[2])
                told["given_logprobs"] = told["given_logprobs"][..., :width]
                cut = wanted | {"given_logprobs": wanted["given_logprobs"][..., :width]}
                same(told, {name: bits[order] for name, bits in cut.items()})


# --- examples


def one_request(
    mesh, row: list[float], params: SamplingParams, mode: str, exchange: str
) -> tuple[int, Told]:
    logits = torch.tensor([row])
    batch = Batch(logits=logits, vocab_size=len(row), params=[params], positions=[3])
    token_ids, told = told_step(mesh, batch, Layout(exchange=exchange), mode)
    return int(token_ids), told


@worlds("cpu:1", "cpu:2")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_raw_and_processed(ranks, exchange):
    """Catches modes mixed up: at temperature 2 and with top_k = 2, raw depends on neither."""
    row = [1.0, 3.0, 2.0, 0.0]
    hot = SamplingParams(temperature=2, top_k=2, seed=5, logprobs=4, kept_capacity=4, entropy=True)
    plain = replace(hot, temperature=1, top_k=0)
    exact = torch.tensor(row).double().log_softmax(0)
    pair = (torch.tensor([3.0, 2.0]).double() / 2).log_softmax(0)
    for token, told in ranks.run(one_request, row, hot, "raw_logprobs", exchange):
        assert token in (1, 2)
        assert told["top_ids"].flatten().tolist() == [1, 2, 0, 3]
        assert floats(told["top_logprobs"]).flatten().tolist() == pytest.approx(
            exact[[1, 2, 0, 3]].tolist(), abs=1e-6
        )
        assert floats(told["token_logprobs"]).item() == pytest.approx(exact[token].item(), abs=1e-6)
        assert told["kept_ids"].flatten().tolist() == [1, 2, -1, -1]
        assert floats(told["kept_logprobs"]).flatten()[:2].tolist() == pytest.approx(
            pair.tolist(), abs=1e-6
        )
        raw = {k: told[k] for k in ("top_ids", "top_logprobs", "entropy")}
    for _, told in ranks.run(one_request, row, plain, "raw_logprobs", exchange):
        same(raw, {k: told[k] for k in raw})
    for token, told in ranks.run(one_request, row, hot, "processed_logprobs", exchange):
        assert told["top_ids"].flatten().tolist() == [1, 2, -1, -1]
        assert floats(told["token_logprobs"]).item() == pytest.approx(
            pair[token - 1].item(), abs=1e-6
        )
        assert floats(told["entropy"]).item() == pytest.approx(
            -(pair * pair.exp()).sum().item(), abs=1e-6
        )
    for mode, shown in (("raw_logits", row), ("processed_logits", [1.5, 1.0])):
        for _, told in ranks.run(one_request, row, hot, mode, exchange):
            found = floats(told["top_logprobs"]).flatten()
            assert found[found > -math.inf].tolist() == pytest.approx(sorted(shown)[::-1])


@worlds("cpu:1", "cpu:4")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_padding_and_ties(ranks, exchange):
    """Catches padding above all-negative logits in ranks, top ids or the sum, and tie orders."""
    row = [-5.0] * 10
    asks = SamplingParams(seed=1, logprobs=10, logprob_token_ids=(9, 0), kept_capacity=3)
    batch = Batch(
        logits=torch.tensor([[*row, 0.0, 7.0]]), vocab_size=10, params=[asks], positions=[0]
    )
    for token_ids, told in ranks.run(told_step, batch, Layout(exchange=exchange), MODES[0]):
        assert 0 <= int(token_ids) < 10
        assert told["ranks"].item() == 1
        assert told["top_ids"].flatten().tolist() == list(range(10))
        for name in ("top_logprobs", "given_logprobs", "token_logprobs", "kept_logprobs"):
            values = floats(told[name]).flatten().tolist()
            assert values == pytest.approx([-math.log(10)] * len(values), abs=1e-6)
        assert told["kept_ids"].flatten().tolist() == [0, 1, 2]
        assert told["num_kept"].item() == 10
        assert told["kept_overflow"].item()


@worlds("cpu:1", "cpu:2", "cuda:1", "cuda:2")
@pytest.mark.parametrize("mode", MODES)
def test_batches_of_greedy_requests(ranks, mode):
    """Catches raw values that are missing where nothing is weighed, and ids that ignore the mode.

    Given ids are ragged: each request's are in the place of its own token, not one a position.
    """
    V, rng = 11, np.random.default_rng(3)
    asks = [
        SamplingParams(temperature=0, logprobs=n, logprob_token_ids=ids, entropy=True)
        for n, ids in [(0, (4,)), (1, ()), (V, (10, 0, 3)), (2, (7, 7))]
    ]
    logits = torch.from_numpy(rng.normal(0, 3, (4, V))).float()
    logits[1, 2] = logits[1, 8] = 9.0
    batch = Batch(logits=logits, vocab_size=V, params=asks, positions=[0] * 4)
    for exchange in EXCHANGES:
        results = ranks.run(told_step, batch, Layout(exchange=exchange), mode)
        check_batch(batch, results, mode)
        if mode == "processed_logprobs":
            assert floats(results[0][1]["token_logprobs"]).flatten().tolist() == [0.0] * 4


@worlds("cpu:4")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_without_requests(ranks, exchange, pools):
    """Catches an optional output that is lost where ranks own nothing or owners interleave."""
    batch = asking_batch(5, 3, 23, seeded=True)
    wants: dict[str, Any] = {
        "logprobs": 4,
        "logprob_token_ids": (2,),
        "kept_capacity": 5,
        "entropy": True,
    }
    batch = replace(batch, params=[replace(p, **wants) for p in batch.params])
    layout = Layout(exchange=exchange, owners="slot", slots=[0, 4, 1])
    wanted_ids, wanted = pools_run(pools, "cpu:1", told_step, batch, Layout(), MODES[1])[0]
    assert wanted is not None
    for token_ids, told in ranks.run(told_step, batch, layout, MODES[1]):
        assert torch.equal(token_ids, wanted_ids)
        same(told, wanted)


@worlds("cpu:1", "cpu:2")
def test_nothing_is_told_unasked(ranks):
    batch = random_batch(5, 6, 23)
    for exchange in EXCHANGES:
        for _, told in ranks.run(told_step, batch, Layout(exchange=exchange), MODES[0]):
            assert told is None
    for _, told in ranks.run(told_step, asking_batch(5, 6, 23).take([]), Layout(), MODES[0]):
        assert told is None


def replayed(mesh, batch: Batch, exchange: str) -> list[tuple[Any, ...]]:
    """What is told of tokens; of raw logits and kept ids, their log-probabilities and its own."""
    layout = Layout(exchange=exchange)
    token_ids, told = told_step(mesh, batch, layout, "processed_logprobs")
    assert told is not None
    results = []
    for i, params in enumerate(batch.params):
        own = {name: bits[i, 0] for name, bits in told.items()}
        ids = own["kept_ids"][own["kept_ids"] >= 0].cpu()
        left = (batch.logits[i].double()[ids] / params.temperature).log_softmax(0)
        token = int(token_ids[i, 0])
        results.append((own, left.tolist(), left[ids.tolist().index(token)].item()))
    return results


@worlds("cpu:1", "cpu:2", "cuda:2")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_kept_tokens_replay_the_distribution(ranks, exchange):
    """Catches an importance ratio that is off by the logarithm of the kept mass."""
    V, generator = 300, torch.Generator().manual_seed(2)
    asks = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=i, kept_capacity=V)
        for i, (t, k, p, m) in enumerate(
            [(1, 0, 0.9, 0), (0.7, 20, 1, 0), (1.5, 50, 0.8, 0.01), (1, 0, 1, 0.1), (1, 2, 1, 0)]
        )
    ]
    logits = (torch.randn(5, V, generator=generator) * 3).bfloat16()
    batch = Batch(logits=logits, vocab_size=V, params=asks, positions=list(range(5)))
    for results in ranks.run(replayed, batch, exchange):
        for told, left, own in results:
            assert not told["kept_overflow"]
            kept = floats(told["kept_logprobs"])
            assert kept[kept > -math.inf].tolist() == pytest.approx(left, abs=1e-5)
            assert floats(told["token_logprobs"]).item() == pytest.approx(own, abs=1e-5)
            assert told["num_kept"].item() == len(left) < V


@worlds("cpu:1", "cpu:2", "cuda:2")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_kept_tokens_beyond_float32(ranks, exchange):
    """Catches ids left out of what `num_kept` counts, since their log-probabilities are -inf."""
    least = torch.finfo(torch.float32).min
    row = [1.0, 0.5, least, least, 2.0, -math.inf]
    asks = SamplingParams(temperature=0.8, seed=0, kept_capacity=6, logprobs=6)
    left = (torch.tensor(row[:2] + row[4:5]) / 0.8).log_softmax(0)[[2, 0, 1]].tolist()
    for mode in MODES:
        for _, told in ranks.run(one_request, row, asks, mode, exchange):
            assert told["num_kept"].item() == 5
            for name in ("kept_ids", "top_ids"):
                assert told[name].flatten().tolist() == [4, 0, 1, 2, 3, -1]
            kept = floats(told["kept_logprobs"]).flatten().tolist()
            assert kept == pytest.approx([*left, *[-math.inf] * 3], abs=1e-5)


@worlds("cpu:2")
def test_a_request_without_filters_keeps_all(ranks):
    """Catches a list of the whole vocabulary where a count says as much."""
    asks = SamplingParams(seed=0, kept_capacity=2)
    for exchange in EXCHANGES:
        for _, told in ranks.run(one_request, [0.0] * 50, asks, MODES[0], exchange):
            assert told["kept_ids"].shape == (1, 1, 2)
            assert told["num_kept"].item() == 50
            assert told["kept_overflow"].item()


def costs(mesh, exchange: str, mode: str) -> list[tuple]:
    """What steps promised to say and what they said: requests with one row, then with drafts."""
    rng, V, K = np.random.default_rng(1), 13, 2
    state = SamplingState(
        mesh,
        vocab_size=V,
        max_num_reqs=9,
        num_speculative_tokens=K,
        logprobs_mode=mode,
        seed=0,
    )
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"logprobs": 0},
        {"logprobs": 3, "logprob_token_ids": [1, 2], "temperature": 0},
        {"kept_capacity": 4, "top_k": 2},
        {"entropy": True},
    ]
    for slot, kind in enumerate(kinds):
        state.add(slot, SamplingParams(**kind))
    sharder, results = BatchSharder(state), []
    for slots in ([0], [0, 1], [2], [3, 0, 1], [4, 2, 0, 1, 3]):
        for rows in (None, [1 + slot % (K + 1) for slot in slots]):
            plan = sharder.plan(slots, rows, exchange=exchange)
            count = sum(plan.num_logits)
            logits = torch.from_numpy(rng.normal(0, 3, (count, V))).float().to(mesh.device_type)
            sharded = shard_vocab(plan.select(logits), mesh)
            with CollectiveTrace() as trace:
                if rows is None:
                    output = Sampler(state)(sharded, plan)
                else:
                    output = RejectionSampler(state)(sharded, plan, [[1] * K] * len(slots))
            assert (output.logprobs is None) == (slots == [0])
            cost = plan.cost(torch.float32, method=None if rows is None else "block")
            sent = sum(sent_bytes(call, mesh.size()) for call in trace.calls)
            said = tuple(KINDS[name] for name, *_ in trace.calls)
            results.append((said, cost.collectives, sent, cost.wire_bytes, trace.calls))
    return results


@worlds("cpu:1", "cpu:2", "cpu:4")
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("mode", MODES[:2])
def test_costs(ranks, exchange, mode):
    """Catches a collective that only some ranks run, one too many, and bytes that are not told."""
    first, *others = ranks.run(costs, exchange, mode)
    assert all(other == first for other in others)
    for said, promised, sent, bytes_promised, _ in first:
        assert said == promised
        assert abs(sent - bytes_promised) <= len(said)  # each is rounded
        if exchange != "vocab" and ranks.size > 1:
            assert len(said) <= 3


@pytest.mark.slow
@worlds("cpu:2", "cuda:2")
@pytest.mark.timeout(300)
def test_compiled_steps_tell_the_same(ranks):
    """Catches what a compiled step computes otherwise, or does not give out."""
    batch, eager = wide_batch(78), Layout()
    for mode in MODES[:2]:
        wanted = ranks.run(told_step, batch, eager, mode)
        got = ranks.run(told_step, batch, replace(eager, compile=True), mode, timeout=150)
        for (ids, told), (wanted_ids, wanted_told) in zip(got, wanted, strict=True):
            assert torch.equal(ids, wanted_ids)
            same(told, wanted_told)


def refused_to_tell(mesh) -> tuple[list[int], list[int], list[int]]:
    """Positions after a step that failed as it told of tokens; tokens then, and without it."""
    positions: list[int] = []
    tokens, V = [], 9
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(3)).to(mesh.device_type)
    for fails in (True, False):
        state = SamplingState(mesh, vocab_size=V, max_num_reqs=2, seed=0)
        for slot in range(2):
            state.add(slot, SamplingParams(logprobs=1))
        plan, sampler = BatchSharder(state).plan([0, 1]), Sampler(state)
        if fails:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("dtensor_sample.sampler.report", Mock(side_effect=MemoryError))
                with pytest.raises(MemoryError):
                    sampler(shard_vocab(logits, mesh), plan)
            positions = state.positions.tolist()
        output = sampler(shard_vocab(logits, mesh), plan)
        tokens.append(output.token_ids[:, 0].tolist())
    return positions, tokens[0], tokens[1]


@worlds("cpu:2")
def test_a_step_that_fails_to_tell_moves_nothing(ranks):
    """Catches positions that have moved on when a step fails after its tokens were drawn."""
    for positions, after, alone in ranks.run(refused_to_tell):
        assert positions == [0, 0]
        assert after == alone

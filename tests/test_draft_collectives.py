"""What ranks say to each other in steps with drafts: the same on all, and no more than promised."""

import math
import re

import numpy as np
import torch

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    SamplingState,
)
from tests.batches import OWNERS, random_params, shard_vocab
from tests.test_collectives import KINDS, CollectiveTrace

SLOTS, K, V = 11, 3, 13
EXCHANGES = ("batch", "vocab", "replicate")


def random_steps(mesh, exchange: str, steps: int) -> list[tuple]:
    """(what, rows, requests, promised cost, traced) of an engine's random steps with drafts."""
    rng = np.random.default_rng(5)
    device = mesh.device_type
    state = SamplingState(
        mesh,
        vocab_size=V,
        max_num_reqs=SLOTS,
        num_speculative_tokens=K,
        exchange=exchange,
        seed=1,
    )
    for slot in range(SLOTS):
        state.add(slot, random_params(rng, V))
    sharders = [BatchSharder(state, owners=owners) for owners in OWNERS]
    drafter = DraftSampler(state)
    verifiers = {m: RejectionSampler(state, method=m) for m in ("standard", "block")}
    results = []

    def trace_of(call, plan, rows: int, *args, **kwargs) -> list:
        logits = torch.from_numpy(rng.normal(0, 3, (rows, V))).bfloat16().to(device)
        sharded = shard_vocab(plan.select(logits), mesh)
        with CollectiveTrace() as trace:
            call(sharded, plan, *args, **kwargs)
        return trace.calls

    for _ in range(steps):
        count = int(rng.choice([0, 1, 2, 5, 11]))
        slots = rng.permutation(SLOTS)[:count].tolist()
        drawn = False
        for step in range(int(rng.integers(K + 1))):
            plan = sharders[int(rng.integers(3))].plan(slots)
            calls = trace_of(drafter, plan, count, step=step)
            cost = plan.cost(torch.bfloat16)
            results.append(("draft", plan.num_rows, cost.collectives, cost.wire_bytes, calls))
            drawn |= any(not state.request(slot).params.greedy for slot in slots)
        rows = rng.integers(1, K + 2, count).tolist()
        with CollectiveTrace() as trace:
            plan = sharders[int(rng.integers(3))].plan(slots, rows)
        assert not trace.calls
        method = str(rng.choice(["standard", "block"]))
        drafts = rng.integers(-1, V, (count, K)).tolist()
        calls = trace_of(verifiers[method], plan, sum(rows), drafts)
        cost = plan.cost(
            torch.bfloat16, method=method, draft_dtype=torch.bfloat16 if drawn else None
        )
        results.append(("verify", plan.num_rows, cost.collectives, cost.wire_bytes, calls))
        if plan.max_rows_per_request > 1 and method == "block" and not drawn:
            assert plan.cost(torch.bfloat16) == cost
    return results


def sent_bytes(call: tuple[str, ...], ranks: int) -> float:
    """What one rank sends in a traced collective, rings for all-gather and all-reduce."""
    match = re.fullmatch(r"torch\.(\w+)\[([\d, ]*)\]", call[1])
    assert match
    size = getattr(torch, match[1]).itemsize
    size *= math.prod(int(n) for n in match[2].split(",") if n.strip())
    kind = KINDS[call[0]]
    share = {"all_to_all": 1 / ranks, "all_gather": 1, "all_reduce": 2 / ranks}[kind]
    return (ranks - 1) * share * size


def test_traces_of_random_steps(ranks):
    """Catches collectives that depend on what one rank holds, and a cost that is not what is sent.

    `batch` promises one all-to-all of logits and one all-gather of packed results, for a draft and
    for a verified step alike; `vocab` sends no logits.
    """
    for exchange in EXCHANGES:
        first, *others = ranks.run(random_steps, exchange, 10)
        assert all(other == first for other in others)
        for what, rows, promised, wire_bytes, calls in first:
            kinds = tuple(KINDS[name] for name, *_ in calls)
            assert kinds == promised
            assert wire_bytes == round(sum(sent_bytes(call, ranks.size) for call in calls))
            if ranks.size == 1 or rows == 0:
                assert kinds == ()
            elif exchange == "batch":
                assert kinds == ("all_to_all", "all_gather")
            elif exchange == "replicate":
                assert kinds == ("all_gather", "all_gather")
            else:
                assert "all_to_all" not in kinds
                assert all("float" not in argument for call in calls for argument in call)
                assert what == "verify" or len(kinds) <= 7
        assert {what for what, *_ in first} == {"draft", "verify"}

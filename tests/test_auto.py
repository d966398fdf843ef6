"""What "auto" takes, alike on all ranks, and the predictions that it stands on."""

import csv
import json
import logging
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import fit_cost
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
    replicated,
    sample,
)
from dtensor_sample import calibrate as calibrating
from dtensor_sample.__main__ import main
from dtensor_sample.calibrate import Measurement, fit_to, read
from dtensor_sample.choose import FEW_ROWS, MARGIN_PERCENT
from dtensor_sample.draft.sequential import MarkovHead, SequentialDraftSampler
from dtensor_sample.exchange import EXCHANGES, exchange_of
from dtensor_sample.explain import choice_of
from dtensor_sample.log import say
from dtensor_sample.params import Filters
from dtensor_sample.predict import CONSTANTS, TABLE, Hardware, hardware, write
from dtensor_sample.sharder import assign_owners
from dtensor_sample.workload import Workload
from tests.batches import Batch, random_batch, shard_vocab, tokens
from tests.pool import FEW_WORLDS, worlds

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs" / fit_cost.FILES["h200"][0]
LOOPS = ROOT / "docs" / "2026-11-30-draft-loop-h200-x2.csv"


# --- predictions, against what was measured


def test_predicted_times_of_rows_that_were_not_fitted():
    """Catches a model that only repeats what it was fitted to."""
    found = fit_cost.held_out(fit_cost.measurements("h200"), fit_cost.ASSUMED["h200"])
    assert len(found) >= len(read(REPORT)) >= 24
    assert statistics.median(fit_cost.error(m, us) for m, us in found) <= 0.15
    for name in EXCHANGES:
        own = [fit_cost.error(m, us) for m, us in found if m.exchange == name]
        assert statistics.median(own) <= 0.2, name


def test_the_table_is_fitted_to_the_reports():
    """Catches constants that were changed by hand, or left behind by newer measurements."""
    for name in fit_cost.FILES:
        found = fit_to(fit_cost.measurements(name), fit_cost.ASSUMED[name])
        known = hardware(name)
        assert found.constants == pytest.approx(dict(known.constants), rel=1e-3, abs=1e-3)
        assert (known.hop_us, known.node_ranks) == (found.hop_us, found.node_ranks)
    assert set(json.loads(TABLE.read_text())) == set(fit_cost.FILES)


def test_predicted_memory():
    """Catches memory that is off by more than what allocators round."""
    with REPORT.open() as file:
        records = [record for record in csv.DictReader(file) if record["way"] in EXCHANGES]
    records = [record for record in records if record["drafts"] != "drafted"]
    for record, m in zip(records, read(REPORT), strict=True):
        mib = float(record["extra_mib"])
        assert m.cost.peak_bytes / 2**20 == pytest.approx(mib, rel=0.05, abs=0.15), record


def test_choices_on_measured_steps():
    """Catches choices that were measured to be slow.

    For few rows slower than `replicate` by more than 2 percent, for others than the best by 5.
    """
    measured = read(REPORT)
    steps = {(m.rows, m.ranks, m.filters, m.K): m.step for m in measured}
    for step in steps.values():
        us = {m.exchange: m.us for m in measured if m.step == step}
        taken = us[choice_of(step, "h200")]
        if len(step.rows_B) <= FEW_ROWS:
            assert taken <= 1.02 * us["replicate"], step
        else:
            assert taken <= 1.05 * min(us.values()), step


def step_of(rows: int, ranks: int, filtered: bool, K: int = 0, **others: Any) -> Workload:
    requests = -(-rows // (K + 1))
    rows_B = [K + 1] * requests
    rows_B[-1] -= sum(rows_B) - rows
    room = [requests] * ranks
    return Workload(
        ranks=ranks,
        rows_B=rows_B,
        owners_B=assign_owners("balanced", range(requests), rows_B, [None] * requests, room),
        vocab_size=129_280,
        filters=Filters(filtered, filtered, drawn=True),
        dtype=torch.bfloat16,
        K=K,
        method="block" if K else None,
        **others,
    )


def test_the_choice_is_the_least_predicted_time():
    """Catches lines that are not what the model says, and rows beyond FEW_ROWS left to habit."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        K = int(rng.choice([0, 0, 7]))
        ranks = int(rng.choice([1, 2, 8, 64]))
        rows = (K + 1) * int(rng.choice([1, 3, 5, 8, 16, 60, 200, 2000]))
        step = step_of(rows, ranks, bool(rng.integers(2)), K)
        machine = str(rng.choice(["h200", "cpu"]))
        us = {name: hardware(machine).us(step.cost(name), ranks) for name in EXCHANGES}
        taken, least = choice_of(step, machine), min(us.values())
        seen.add(taken)
        if rows > FEW_ROWS:
            assert us[taken] <= 1.0001 * least
        elif us["replicate"] <= (1 + MARGIN_PERCENT / 100) * least:
            assert taken == "replicate"
    assert seen == set(EXCHANGES)


def test_few_rows_leave_the_plain_way_for_much_less_time_only():
    few = {rows: choice_of(step_of(rows, 2, False), "h200") for rows in (1, FEW_ROWS)}
    assert set(few.values()) == {"replicate"}
    assert choice_of(step_of(FEW_ROWS + 1, 2, False), "h200") == "batch"


def test_more_ranks_cost_what_is_assumed():
    """Catches hops, or links between nodes, that do not count."""
    step = {P: step_of(4096, P, False) for P in (2, 4, 8, 16)}
    flat = Hardware("", "", dict.fromkeys(CONSTANTS, 0.0), 10.0, 8, 100.0)
    us = {P: flat.us(step[P].cost("batch"), P) for P in step}
    assert us == {
        2: 0.0,
        4: 20.0,  # two collectives, one doubling
        8: 40.0,
        16: pytest.approx(60.0 + us_between_nodes(16, 8, 100.0)),
    }


def us_between_nodes(P: int, node: int, bytes_per_us: float) -> float:
    """By hand: of every row an owner elsewhere gets this rank's columns; results come in copies."""
    logits = 4096 * (129_280 // P) * 2 / P * (P - node)
    results = 5 * 8 * (4096 / P) * (P - node) / node
    return (logits + results) / bytes_per_us


def test_nonnegative_fits():
    """Catches a fit that gives time back, or misses what is there."""
    base = fit_cost.ASSUMED["h200"]
    true = {name: 1.0 + i for i, name in enumerate(CONSTANTS)}
    machine = Hardware("", "", true, base.hop_us, base.node_ranks, base.node_bytes_per_us)
    cases = [
        Measurement(
            exchange=name,
            rows=rows,
            ranks=ranks,
            vocab_size=vocab,
            dtype=torch.bfloat16,
            filters=filters,
            us=1.0,
            K=K,
            method="block" if K else None,
        )
        for name in EXCHANGES
        for rows in (8, 64, 512, 4096)
        for ranks in (1, 2, 4)
        for vocab in (1000, 100_000)
        for filters in ("off", "on", "top-p")
        for K in (0, 7)
    ]
    exact = [with_us(case, machine.us(case.cost, case.ranks)) for case in cases]
    assert fit_to(exact, base).constants == pytest.approx(true, rel=1e-6)
    rng = np.random.default_rng(1)
    few = [case for case in cases if case.ranks <= 2]  # no hops, which are subtracted
    noisy = [with_us(case, case.rows * rng.uniform(0.1, 9)) for case in few]
    found = fit_to(noisy, base).constants
    assert min(found.values()) >= 0
    free = squares(noisy, found, base)
    for name in CONSTANTS:  # no constant could be better by itself
        for factor in (0.99, 1.01):
            assert squares(noisy, {**found, name: found[name] * factor}, base) >= free * (1 - 1e-9)


def with_us(case: Measurement, us: float) -> Measurement:
    fields = {name: getattr(case, name) for name in Measurement.__dataclass_fields__}
    return Measurement(**fields | {"us": us})


def squares(
    measured: Sequence[Measurement], constants: Mapping[str, float], base: Hardware
) -> float:
    machine = Hardware("", "", constants, base.hop_us, base.node_ranks, base.node_bytes_per_us)
    return sum(fit_cost.error(m, machine.us(m.cost, m.ranks)) ** 2 for m in measured)


# --- what steps take


def table(path: Path, **faster: float) -> str:
    """A file of constants under which some operations cost much less than others."""
    base = Hardware("test", "a test", dict.fromkeys(CONSTANTS, 100.0), 0.0, 8, 1e6)
    constants = {**base.constants, **faster}
    write(path, [Hardware("test", "a test", constants, 0.0, 8, 1e6)])
    return str(path)


def steps(mesh, batch: Batch, name: str) -> dict[str, Any]:
    """Which exchanges steps of growing size took, and their tokens; and the stateless call's."""
    with mock.patch.dict("os.environ", DTENSOR_SAMPLE_HARDWARE=name):
        state = SamplingState(
            mesh, vocab_size=batch.vocab_size, max_num_reqs=len(batch), seed=batch.base_seed
        )
        for slot, params in enumerate(batch.params):
            state.add(slot, params, position=batch.positions[slot])
        sharder, sampler = BatchSharder(state), Sampler(state)
        taken, drawn = [], []
        for size in (1, 2, 5, 11, len(batch)):
            plan = sharder.plan(range(size), positions=batch.positions[:size])
            hidden = batch.logits[:size].to(mesh.device_type)
            drawn.append(sampler(shard_vocab(plan.select(hidden), mesh), plan).token_ids[:, 0])
            taken.append(plan.exchange.name)
        assert sharder.plan(range(3), capacity=9).exchange.name == "batch"
        with mock.patch("dtensor_sample.functional.exchange_of", wraps=exchange_of) as chosen:
            every = (shard_vocab(batch.logits, mesh), on_all(batch, mesh))
            drawn += [sample(x, batch.params, position=batch.positions) for x in every]
        stateless = [call.args[0] for call in chosen.call_args_list]
    return {"taken": taken, "tokens": [x.tolist() for x in drawn], "stateless": stateless}


def on_all(batch: Batch, mesh):
    return replicated(batch.logits.to(mesh.device_type), mesh)


@worlds(*FEW_WORLDS)
def test_steps_switch_and_tokens_do_not(ranks, tmp_path):
    """Catches ranks that choose by themselves, always the same, or tokens that hang on it."""
    batch = random_batch(3, 40, 1003, seeded=True)
    per_byte = table(tmp_path / "bytes.json", collective_us=0.0, gather_us_per_mb=1e9)
    sent = table(tmp_path / "sent.json", all_to_all_us_per_mb=1e9)
    fast = table(tmp_path / "fast.json", all_to_all_us_per_mb=0.0, collective_us=0.0)
    found = {}
    for name in (per_byte, sent, fast):
        first, *others = ranks.run(steps, batch, name)
        assert all(other == first for other in others)
        every = tokens(batch)
        assert first["tokens"] == [*(every[:n] for n in (1, 2, 5, 11, 40)), every, every]
        found[name] = first
    if ranks.size > 1:
        assert found[sent]["taken"][-1] != "batch" == found[fast]["taken"][-1]
        assert found[fast]["taken"][0] == "replicate"
        assert found[sent]["stateless"][0] != "batch"
        assert found[sent]["stateless"][1] == "batch"  # no logit has to move
        assert len({taken for run in found.values() for taken in run["taken"]}) >= 2


def bucketed(mesh, name: str) -> list[tuple[str, int]]:
    """What plans take that are padded to a few capacities, and the rows that they have then."""
    with mock.patch.dict("os.environ", DTENSOR_SAMPLE_HARDWARE=name):
        state = SamplingState(mesh, vocab_size=1003, max_num_reqs=20, seed=0)
        for slot in range(20):
            state.add(slot, SamplingParams())
        sharder = BatchSharder(state, owners="slot", buckets=[5, 8])
        plans = [sharder.plan(slots) for slots in (range(10), range(12), range(0, 20, 2))]
        for plan in plans:
            found = {each.exchange: each for each in plan.explain(torch.bfloat16).estimates}
            cost, taken = plan.cost(torch.bfloat16), found[plan.exchange.name]
            assert (taken.num_rows, taken.wire_bytes) == (plan.num_rows, cost.wire_bytes)
    return [(plan.exchange.name, plan.num_rows) for plan in plans]


@worlds("cpu:2", "cuda:2")
def test_buckets(ranks, tmp_path):
    """Catches a choice by rows that a padded step does not have, and one that no bucket holds."""
    fast = table(tmp_path / "fast.json", all_to_all_us_per_mb=0.0, collective_us=0.0)
    for found in ranks.run(bucketed, fast):
        assert found[:2] == [("batch", 10), ("batch", 16)]
        taken, rows = found[2]  # one owner has all ten rows: more than fit into eight
        assert (taken != "batch", rows) == (True, 10)


def bound(mesh, name: str) -> list[object]:
    """Plans of a state before and after drafts are drawn, and kept under an exchange."""
    device = mesh.device_type
    with mock.patch.dict("os.environ", DTENSOR_SAMPLE_HARDWARE=name):
        state = SamplingState(mesh, vocab_size=10, max_num_reqs=8, num_speculative_tokens=2, seed=0)
        for slot in range(8):
            state.add(slot, SamplingParams())
        sharder = BatchSharder(state)

        def taken(**kwargs) -> str:
            return sharder.plan([0], **kwargs).exchange.name

        before = taken()
        DraftSampler(state, greedy=True)
        greedy = state.bound_exchange
        drafter = DraftSampler(state)
        expected, here = state.bound_exchange, taken()
        plan = sharder.plan(range(3), exchange="vocab")
        logits = torch.zeros(3, 10, device=device)
        drafter(shard_vocab(plan.select(logits), mesh), plan, step=0)
        waiting = sharder.plan([0])
        assert (waiting.explain().choice, waiting.exchange.name) == ("vocab", "vocab")
        found: list[object] = [before, greedy, expected, here, state.bound_exchange, taken()]
        state.remove(0)
        found.append(state.bound_exchange)
        verifying = sharder.plan([1, 2], [2, 2])
        logits = torch.zeros(4, 10, device=device)
        RejectionSampler(state)(
            shard_vocab(verifying.select(logits), mesh),
            verifying,
            torch.zeros(2, 2).long().to(device),
        )
        found.append(state.bound_exchange)
        assert waiting.explain().choice == "vocab"  # as when it was made
        return found


def beside_what_is_bound(mesh) -> list[str]:
    """What "auto" is with a capacity, and beside drafts and biases that lie by other exchanges."""
    with mock.patch.dict("os.environ", DTENSOR_SAMPLE_HARDWARE="h200"):
        state = SamplingState(
            mesh, vocab_size=129_280, max_num_reqs=256, num_speculative_tokens=7, seed=0
        )
        drafter, sharder, found = DraftSampler(state), BatchSharder(state), []
        for slot in range(255):
            state.add(slot, SamplingParams())
        found.append(sharder.plan([0]).exchange.name)
        found.append(sharder.plan([0], capacity=4).exchange.name)
        plan = sharder.plan([0], exchange="batch")
        logits = torch.zeros(1, 129_280)
        drafter(shard_vocab(plan.select(logits), mesh), plan, step=0)
        state.add(255, SamplingParams(presence_penalty=1.0))
        sharder.plan([255], exchange="vocab")  # not used, but 255 has its counts there
        verifying, counted = sharder.plan([0], [2]), sharder.plan([255])
        assert verifying.explain().choice == verifying.exchange.name
        assert counted.explain().choice == counted.exchange.name
        found += [verifying.exchange.name, counted.exchange.name]
        # About to draft beside those that wait, which narrow requests may; and a capacity.
        found.append(sharder.plan([1]).exchange.name)
        with pytest.raises(ValueError, match="capacity must be None"):
            sharder.plan([255], capacity=4)
        return [*found, sharder.plan([1], capacity=4).exchange.name]


@worlds("cpu:2")
def test_auto_beside_what_is_bound(ranks):
    """Catches a capacity, or drafts that wait, under an exchange that does not have them."""
    for found in ranks.run(beside_what_is_bound):
        assert found == ["vocab", "batch", "batch", "vocab", "batch", "batch"]


def settled_while_drafts_wait(mesh) -> list[str | None]:
    """What "auto" is for good once a request with a bias came, before drafts and beside some."""
    found = []
    for early in (True, False):
        with mock.patch.dict("os.environ", DTENSOR_SAMPLE_HARDWARE="h200"):
            state = SamplingState(
                mesh, vocab_size=10, max_num_reqs=8, num_speculative_tokens=1, seed=0
            )
            drafter = DraftSampler(state)
            biased = SamplingParams(logit_bias={1: 1.0})
            state.add(0, biased if early else SamplingParams())
            if not early:
                plan = BatchSharder(state).plan([0], exchange="vocab")
                drafter(shard_vocab(plan.select(torch.zeros(1, 10)), mesh), plan, step=0)
                state.add(1, biased)
                state.remove(0)
            found.append(state.settled_exchange)
    return found


@worlds("cpu:2")
def test_biases_settle_the_exchange_while_drafts_wait(ranks):
    """Catches wide state that would be bound to what suits the few requests of its first step."""
    for early, late in ranks.run(settled_while_drafts_wait):
        assert early == late == "batch"


def bound_by_number(mesh) -> list[str | None]:
    """Where "auto" keeps 7 drafts each of 1 to 256 requests, without filters."""
    with mock.patch.dict("os.environ", DTENSOR_SAMPLE_HARDWARE="h200"):
        state = SamplingState(
            mesh, vocab_size=129_280, max_num_reqs=256, num_speculative_tokens=7, seed=0
        )
        DraftSampler(state)
        found = []
        for slot in range(256):
            state.add(slot, SamplingParams())
            found.append(state.bound_exchange)
    return found


@worlds("cpu:2")
def test_one_request_more_seldom_changes_the_exchange(ranks):
    """Catches a choice that goes back and forth with each request, and a graph for each side."""
    (found, _) = ranks.run(bound_by_number)
    changes = {i for i in range(1, 256) if found[i] != found[i - 1]}
    assert changes  # only where the number passes a power of two
    assert changes <= {1, 2, 4, 8, 16, 32, 64, 128}


@worlds("cpu:2")
def test_whole_rows_where_drafts_are_not_whole(ranks):
    """Catches a plan that would give parts of rows to what must see all of them."""
    for found in ranks.run(whole_rows_among_parts):
        assert "whole rows" in found


def whole_rows_among_parts(mesh) -> str:
    """What a plan says while drafts are kept by columns, and something looks at whole rows."""
    state = SamplingState(mesh, vocab_size=10, max_num_reqs=1, num_speculative_tokens=2, seed=0)
    state.add(0, SamplingParams())
    sharder = BatchSharder(state)
    plan = sharder.plan([0], exchange="vocab")
    DraftSampler(state)(shard_vocab(plan.select(torch.zeros(1, 10)), mesh), plan, step=0)
    state.needs_whole_rows = "a test looks at whole rows"
    with pytest.raises(ValueError, match="whole rows") as refused:
        sharder.plan([0])
    return str(refused.value)


@worlds("cpu:2", "cuda:2")
def test_drafts_bind_the_exchange(ranks):
    """Catches draft logits that all ranks keep, and drafts long gone that still bind."""
    for found in ranks.run(bound, "h200"):
        kept = ["replicate", None, "batch", "batch", "vocab", "vocab"]
        assert found == [*kept, "vocab", "batch"]


FILTERED = {"off": SamplingParams(), "on": SamplingParams(top_k=50, top_p=0.95)}
"""Requests of the reports, by what they call their filters."""


def kept_by(mesh, K: int, head: MarkovHead | None, params: SamplingParams, n: int) -> str | None:
    """Where "auto" keeps K drafts, drawn one by one or by a head, of so many requests."""
    with mock.patch.dict("os.environ", DTENSOR_SAMPLE_HARDWARE="h200"):
        state = SamplingState(
            mesh, vocab_size=129_280, max_num_reqs=n, num_speculative_tokens=K, seed=0
        )
        for slot in range(n):
            state.add(slot, params)
        if head is None:
            DraftSampler(state)
        else:
            SequentialDraftSampler(state, head)
        return state.bound_exchange


def kept_by_steps(mesh, cases: list[tuple[int, str]]) -> list[str | None]:
    """Where "auto" keeps 7 drafts of so many requests, with filters or without."""
    return [kept_by(mesh, 7, None, FILTERED[filters], n) for n, filters in cases]


@worlds("cpu:2")
def test_where_drafts_are_kept_on_measured_steps(ranks):
    """Catches draft logits that lie where steps that draw and verify 7 drafts were slow."""
    with REPORT.open() as file:
        records = [r for r in csv.DictReader(file) if r["way"] in EXCHANGES]
    us = {
        (int(r["rows"]), r["filters"], r["way"]): float(r["us"])
        for r in records
        if r["drafts"] == "drafted"
    }
    cases = sorted({(rows, filters) for rows, filters, _ in us})
    (kept, *_) = ranks.run(kept_by_steps, [(rows // 8, filters) for rows, filters in cases])
    for case, name in zip(cases, kept, strict=True):
        assert us[*case, name] <= 1.05 * min(us[*case, each] for each in EXCHANGES), case


def kept_by_loops(mesh, cases: list[tuple[int, int, str]]) -> list[str | None]:
    """Where "auto" keeps drafts of so many requests and so many each, drawn in a loop."""
    head = MarkovHead(torch.zeros(129_280, 1), torch.zeros(1, 129_280))
    return [kept_by(mesh, K, head, FILTERED[filters], n) for n, K, filters in cases]


@worlds("cpu:2")
def test_where_drafts_of_a_loop_are_kept_on_measured_steps(ranks):
    """Catches a drafting loop under an exchange that was slower than the best by over 5 percent."""
    with LOOPS.open() as file:
        records = [r for r in csv.DictReader(file) if r["way"] in EXCHANGES]
    us = {
        (int(r["requests"]), int(r["k"]), r["filters"], r["way"]): float(r["us"]) for r in records
    }
    cases = sorted({(requests, K, filters) for requests, K, filters, _ in us})
    (kept, *_) = ranks.run(kept_by_loops, cases)
    for case, name in zip(cases, kept, strict=True):
        assert us[*case, name] <= 1.05 * min(us[*case, each] for each in EXCHANGES), case


def whole_rows(mesh, name: str) -> tuple[str, list[str], list[str]]:
    """What a state says whose steps need whole rows, and what it takes instead of `vocab`."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dtensor_sample")
    logger.addHandler(handler)
    say.cache_clear()
    try:
        with mock.patch.dict("os.environ", DTENSOR_SAMPLE_HARDWARE=name):
            state = SamplingState(mesh, vocab_size=9999, max_num_reqs=8, seed=0)
            for slot in range(8):
                state.add(slot, SamplingParams())
            sharder = BatchSharder(state)
            taken = [sharder.plan(range(8)).exchange.name]
            state.needs_whole_rows = "a test looks at whole rows"
            with pytest.raises(ValueError, match="got") as refused:
                sharder.plan(range(8), exchange="vocab")
            taken += [sharder.plan(range(8)).exchange.name for _ in range(3)]
    finally:
        logger.removeHandler(handler)
    return str(refused.value), taken, said


@worlds("cpu:2", "cuda:2")
def test_steps_that_need_whole_rows(ranks, tmp_path):
    name = table(tmp_path / "sent.json", all_to_all_us_per_mb=1e9, gather_us_per_mb=1e9)
    for rank, (refused, taken, said) in enumerate(ranks.run(whole_rows, name)):
        reason = "a test looks at whole rows"
        assert refused == f"exchange must be one of ('batch', 'replicate'), got \"vocab\": {reason}"
        assert taken[0] == "vocab"
        assert set(taken[1:]) <= {"batch", "replicate"}
        told = f"\"auto\" takes one of ('batch', 'replicate'): {reason}"
        assert said == [told] * (rank == 0)


def unlike(mesh, files: list[str]) -> str:
    with mock.patch.dict("os.environ", DTENSOR_SAMPLE_HARDWARE=files[mesh.get_local_rank()]):
        try:
            SamplingState(mesh, vocab_size=10, seed=0)
        except ValueError as error:
            return str(error)
    return ""


@worlds("cpu:2", "cuda:2")
def test_ranks_that_know_other_machines_are_told(ranks, tmp_path):
    """Catches ranks that would take other exchanges, and wait for each other for ever."""
    same = [table(tmp_path / f"{i}.json") for i in range(2)]
    other = table(tmp_path / "other.json", weigh_us=1.0)
    assert ranks.run(unlike, same) == ["", ""]
    for error in ranks.run(unlike, [same[0], other]):
        assert "hardware must be the same on every rank" in error
    first, second = ranks.run(unlike, [same[0], "nowhere.json"])
    assert "refused on rank 1" in first
    assert "gpu must be one of" in second


# --- measuring a machine


def calibrated(mesh, grid: dict[str, Any]) -> tuple[list[Measurement], dict[str, float]]:
    with mock.patch.object(calibrating, "GRID", grid), torch.inference_mode():
        measured = calibrating.measure(mesh)
    return measured, dict(fit_to(measured, hardware("cpu")).constants)


@worlds("cpu:1", "cpu:2", "cuda:1", "cuda:2")
def test_calibration(ranks):
    """Catches ranks that fit other constants, and operations that no measured step has."""
    grid = {ranks.device_type: (1000, (8, 16), 2)}
    (measured, constants), *others = ranks.run(calibrated, grid)
    assert all(found == constants for _, found in others)
    kinds = {(m.exchange, m.filters, m.K) for m in measured}
    exchanges = EXCHANGES if ranks.size > 1 else ("batch",)
    steps = (("off", 0), ("on", 0), ("top-p", 0), ("off", 7))
    assert kinds == {(exchange, *step) for exchange in exchanges for step in steps}
    assert all(m.us > 0 and m.ranks == ranks.size for m in measured)
    assert set(constants) == set(CONSTANTS)
    if ranks.size == 1:
        known = hardware("cpu").constants
        assert all(constants[name] == known[name] for name in CONSTANTS[:3])


@pytest.mark.slow
def test_calibrating_this_machine(tmp_path, capsys):
    """The command, in less than a minute, and the file that it leaves."""
    path = tmp_path / "mine.json"
    command = [sys.executable, "-m", "dtensor_sample", "explain", "--calibrate", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert str(path) in done.stdout
    assert min(hardware(str(path)).constants.values()) >= 0 < hardware(str(path)).hop_us
    main(["explain", "--rows", "8", "--vocab", "999", "--tp", "2", "--gpu", str(path)])
    assert "predicted time" in capsys.readouterr().out

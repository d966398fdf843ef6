"""The benchmark: all ways run, and those that are wrong do not count."""

import argparse

import bench
import pytest
import torch

from dtensor_sample import vocab_sharded
from dtensor_sample.exchange import EXCHANGES
from tests.batches import shard_vocab
from tests.pool import worlds


def records(mesh, rows: list[int], k: int) -> list[dict]:
    args = argparse.Namespace(
        rows=rows, vocab=1003, dtype="bfloat16", k=[k], filters=["off", "on"], rounds=3
    )
    with torch.inference_mode():
        return list(bench.measure(mesh, args))


@worlds("cpu:2", "cuda:2")
def test_every_way_is_timed(ranks):
    for found in ranks.run(records, [2, 3], 0):
        for rows, filters in ((2, "off"), (2, "on"), (3, "off"), (3, "on")):
            own = [r for r in found if (r["rows"], r["filters"]) == (rows, filters)]
            ways = {r["way"] for r in own}
            assert {*EXCHANGES, "gather + sample"} <= ways
            assert ("all-to-all + Gumbel" in ways) == ((rows, filters) == (2, "off"))
            assert all(0 < r["us_20"] <= r["us"] <= r["us_80"] for r in own)


@worlds("cpu:2", "cuda:2")
def test_verification_is_timed(ranks):
    for found in ranks.run(records, [8], 3):
        assert [record["way"] for record in found] == [*EXCHANGES] * 2
        assert {record["k"] for record in found} == {3}


def refused(mesh) -> str:
    """What the check says about an exchange that takes the next token instead."""
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(mesh.device_type)
    rows = vocab_sharded(shard_vocab(logits, mesh).to_local(), mesh, vocab_size=64)
    right = bench.sampled
    bench.sampled = lambda sampler, rows, plan: (
        (right(sampler, rows, plan) + (plan.exchange.name == "vocab")) % 64
    )
    try:
        with pytest.raises(SystemExit) as error:
            bench.check(mesh, rows, bench.FILTERS["off"])
    finally:
        bench.sampled = right
    return str(error.value)


@worlds("cpu:2", "cuda:2")
def test_an_exchange_that_differs_ends_the_benchmark(ranks):
    for error in ranks.run(refused):
        assert "the exchanges differ" in error

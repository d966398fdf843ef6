"""The benchmark: all ways run, and those that are wrong do not count."""

import csv
import itertools
import shutil
from pathlib import Path

import bench
import bench_drafts
import bench_report
import bench_timing
import bench_ways
import numpy as np
import pytest
import torch
from bench_ways import OWN

from dtensor_sample import SamplingParams, calibrate, vocab_sharded
from dtensor_sample.exchange import EXCHANGES
from tests.pool import worlds
from tests.test_distribution import p_value

REPORT = Path(__file__).parent.parent / "docs" / "2026-11-29-bench-h200-x2.csv"


def records(mesh, options: str) -> list[dict]:
    with torch.inference_mode():
        return list(bench.measure(mesh, bench.parse([*options.split(" "), "--rounds", "2"])))


@worlds("cpu:2", "cuda:2")
def test_every_way_is_timed(ranks):
    for found in ranks.run(records, "--rows 2 3 --vocab 1003 --num-speculative-tokens 0 2"):
        cases: dict[tuple, set[str]] = {}
        for r in found:
            cases.setdefault((r["k"], r["rows"], r["filters"]), set()).add(r["way"])
            assert 0 < r["us_20"] <= r["us"] <= r["us_80"]
            assert r["us_99"] is None  # two rounds do not tell
            assert r.keys() == bench.COLUMNS.keys()
        # 2 rows are no request with 2 drafts.
        sizes = itertools.product([(0, 2), (0, 3), (2, 3)], ["off", "on"])
        assert cases.keys() == {(*size, filters) for size, filters in sizes}
        for case, names in cases.items():
            assert {*OWN, "gather + sample"} <= names
            assert ("all-to-all + Gumbel" in names) == (case == (0, 2, "off"))


@worlds("cpu:2", "cuda:2")
def test_verification_alone_is_timed(ranks):
    options = "--rows 8 --vocab 1003 --num-speculative-tokens 3 --drafts one-hot --filters on"
    for found in ranks.run(records, options):
        assert [record["way"] for record in found] == [*OWN, "gather + sample"]
        taken = {record["way"]: record["exchange"] for record in found}
        assert all(taken[name] == name for name in EXCHANGES)
        assert taken["auto"] in EXCHANGES
        assert {(record["k"], record["drafts"]) for record in found} == {(3, "one-hot")}


def loops(mesh, options: str) -> list[dict]:
    args = bench.parse([*options.split(" "), "--draft-loop", "--rounds", "2"])
    with torch.inference_mode():
        return list(bench_drafts.measure(mesh, args, bench.FILTERS))


@worlds("cpu:2", "cuda:2")
def test_every_drafting_loop_is_timed(ranks):
    options = "--rows 1 5 --vocab 203 --num-speculative-tokens 2 --factors 6"
    for found in ranks.run(loops, options):
        ways = [*bench_drafts.LOOPS, "gather + loop"]
        assert [r["way"] for r in found] == ways * 4
        assert {(r["requests"], r["filters"]) for r in found} == {
            *itertools.product((1, 5), ("off", "on"))
        }
        for r in found:
            assert 0 < r["us_20"] <= r["us"] <= r["us_80"]
            assert r.keys() == bench_drafts.COLUMNS.keys()


@worlds("cpu:2")
def test_every_vocabulary_is_measured(ranks):
    """A small one, too: top-k then keeps all of it."""
    for found in ranks.run(records, "--rows 2 --vocab 7 60 --filters on top-p"):
        assert [r["vocab"] for r in found] == [7] * 10 + [60] * 10


def refused(mesh, name: str, K: int) -> str:
    """What the check says about an exchange that takes the next token instead."""
    target, drafts = bench.make_logits(mesh, 6, 64, K, torch.float32)
    right = getattr(bench_ways, name)

    def wrong(sampler, rows, plan, *args):
        return (right(sampler, rows, plan, *args) + (plan.exchange.name == "vocab")) % 64

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_ways, name, wrong)
        with pytest.raises(SystemExit) as error:
            bench_ways.check(mesh, target, K, drafts, bench.FILTERS["off"])
    return str(error.value)


@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize(("name", "K"), [("sampled", 0), ("verified", 2)])
def test_an_exchange_that_differs_ends_the_benchmark(ranks, name, K):
    for error in ranks.run(refused, name, K):
        assert "the exchanges differ" in error


def equal_drafts(mesh) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy tokens of a target that is its own draft, and of another one."""
    target, _ = bench.make_logits(mesh, 6, 64, 2, torch.float32)
    local = target.to_local()
    wrap = {"mesh": mesh, "vocab_size": 64}
    same = [vocab_sharded(local[k::3], **wrap) for k in range(2)]
    other = [vocab_sharded(-local[k::3], **wrap) for k in range(2)]
    return bench_ways.chain(target, 2, same).tolist(), bench_ways.chain(target, 2, other).tolist()


@worlds("cpu:2")
def test_greedy_answers_that_ways_are_checked_by(ranks):
    for same, other in ranks.run(equal_drafts):
        assert min(map(min, same)) >= 0
        assert other == [[row[0], -1, -1] for row in same]


@pytest.mark.parametrize("drawn", [False, True])
def test_law_of_verification_in_torch(drawn):
    """Catches a baseline that is fast for being wrong: what it emits must follow p."""
    torch.manual_seed(5)
    B, K, V = 40_000, 2, 4
    p_JV = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.0, 0.5, 0.25, 0.25]])
    q_JV = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]])
    p_BJV, q_BJV = (x_JV.expand(B, K + 1, V) for x_JV in (p_JV, q_JV))
    token_BK = torch.full((B, K), 1)
    if drawn:
        token_BK = torch.stack([bench_ways.pick(q_BJV[:, k]) for k in range(K)], 1)
    ids_BJ = bench_ways.accept(p_BJV, q_BJV if drawn else None, token_BK)
    assert ((ids_BJ[:, 1:] < 0) | (ids_BJ[:, :-1] >= 0)).all()
    for j in range(K + 1):
        ids = ids_BJ[:, j][ids_BJ[:, j] >= 0]
        assert p_value(np.bincount(ids, minlength=V), p_JV[j].double().numpy()) > 1e-4, j


def test_filters_in_torch():
    """Catches another top-k or top-p than the one that is measured against."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    for params, wanted in (
        (SamplingParams(), [0.4, 0.3, 0.2, 0.1]),
        (SamplingParams(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
    ):
        probs = bench_ways.probabilities(logits, params)
        assert torch.allclose(probs, torch.tensor([wanted]))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--rows 0", "--rows and --vocab"),
        ("--vocab 5 0", "--rows and --vocab"),
        ("--rounds 1", "--rounds"),
        ("--rows 4 12 --num-speculative-tokens 0 7", "--num-speculative-tokens 7"),
        ("--num-speculative-tokens -1", "--num-speculative-tokens"),
        ("--draft-loop --num-speculative-tokens 0", "--draft-loop"),
        ("--draft-loop --factors 0", "--factors"),
        ("--output no/such/folder", "--output"),
        ("--draw no-such.csv", "--draw"),
    ],
)
def test_bad_options_are_refused(capsys, given, named):
    with pytest.raises(SystemExit):
        bench.parse(given.split(" "))
    assert named in capsys.readouterr().err


def test_percentiles():
    assert bench_report.percentile(range(200, 0, -1), 99) == 198
    assert bench_report.percentile([3.0, 1.0, 2.0], 99) == 3
    assert bench_report.percentile([3.0, 1.0, 2.0], 50) == 2
    assert bench_timing.spread(range(100)) == {
        "us": 49.5,
        "us_20": 19.8,
        "us_80": 79.2,
        "us_99": 98,
    }
    assert bench_timing.spread(range(99))["us_99"] is None


@pytest.mark.slow
def test_figures_are_drawn(tmp_path, monkeypatch):
    """Catches figures that earlier files can no longer be drawn as, and lines that are left out."""
    pytest.importorskip("matplotlib", reason="figures need the extra `examples`")
    old = shutil.copy(REPORT, tmp_path / "old.csv")
    monkeypatch.setattr("sys.argv", ["bench.py", "--draw", str(old)])
    bench.main()
    with REPORT.open(newline="") as file:
        rows = list(csv.DictReader(file))
    more = [row | {"vocab": "9", "k": K} for row in rows for K in ("0", "7")]
    bench.draw(more, tmp_path / "new.png")
    sizes = [read_size(tmp_path / name) for name in ("old.png", "new.png")]
    assert sizes == [(1950, 630), (1950, 1260)]


def test_predictions_are_fitted_to_verification_alone(tmp_path):
    """Catches steps that draft too, taken for ones that only verify."""
    rows = [
        {"rows": "8", "filters": "off", "way": "batch", "us": "1", "k": "3", "drafts": drafts}
        for drafts in ("drafted", "one-hot")
    ]
    bench_report.write(tmp_path / "steps", {name: name for name in rows[0]}, rows, "")
    (measured,) = calibrate.read(tmp_path / "steps.csv")
    assert (measured.K, measured.drawn) == (3, False)


def read_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    head = path.read_bytes()[16:24]
    return int.from_bytes(head[:4]), int.from_bytes(head[4:])

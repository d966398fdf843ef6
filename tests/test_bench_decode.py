"""The benchmark of whole decode loops: its model, its drafts, and what it says of its figures."""

from dataclasses import replace

import bench_decode
import pytest
import torch
from bench_model import LOGIT_STD, SIZES, Model

from tests.pool import worlds

pytestmark = pytest.mark.slow

TINY = SIZES["tiny"]


def parse(options: str):
    args = bench_decode.parse(options.split(" "))
    args.size = "tiny"
    return args


def records(mesh) -> tuple[list[dict], str]:
    args = parse("--concurrency 1 3 1 --num-speculative-tokens 0 2 --steps 2 --context 8")
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    model = Model(TINY, mesh, dtype)
    with torch.inference_mode():
        found = list(bench_decode.measure(mesh, model, args))
        bench_decode.estimate(found, bench_decode.room_mib(mesh))
    return found, bench_decode.report(found, args, mesh)


@worlds("cpu:2", "cuda:2")
def test_every_way_is_timed(ranks):
    for found, report in ranks.run(records):
        cases = [(r["K"], r["concurrency"], r["way"]) for r in found]
        wanted = [(K, B, way) for K in (0, 2) for B in (1, 3) for way in bench_decode.WAYS]
        assert cases == wanted
        for r in found:
            K, B = r["K"], r["concurrency"]
            assert r.keys() == bench_decode.COLUMNS.keys()
            assert 0 < r["itl_ms"] <= r["itl_99_ms"]
            assert r["tokens_per_s"] == pytest.approx(1e3 * B / r["tpot_ms"], rel=1e-3, abs=0.1)
            assert 1 <= r["tokens_per_step"] <= K + 1
            assert (r["peak_mib"] is None) == (r["fits"] is None) == (ranks.device_type == "cpu")
            assert f"| {K} | {B} | {r['way']} | {r['tokens_per_s']} |" in report


def accepted(mesh, way: str, options: str) -> float:
    """Tokens a request and step."""
    args = parse(options)
    model = Model(TINY, mesh, torch.float32)
    with torch.inference_mode():
        torch.manual_seed(1)
        step, plan = bench_decode.make_step(model, mesh, way, 64, 2, args)
        _, counts = bench_decode.decode(step, plan, 4, args.context)
    return sum(counts) / 4 / 64


@worlds("cpu:1")
@pytest.mark.parametrize("way", [bench_decode.BASELINE, "batch"])
@pytest.mark.parametrize("top_p", [0.8, 1.0])
def test_drafts_are_accepted_at_the_set_rate(ranks, way, top_p):
    """Catches drafts and likely ids that are out of step, and a probability without top-p."""
    for rate in (0.5, 0.9):
        options = f"--acceptance {rate} --top-p {top_p} --context 8"
        found = ranks.run(accepted, way, options)[0]
        assert abs(found - (1 + rate + rate**2)) < 0.21, rate  # four standard deviations


def seen(mesh) -> list[list[bool]]:
    """[12, 4]: whether the last 4 of 12 tokens, 4 a step, change with each of them.

    In a model of one layer, where nothing is handed on.
    """
    model = Model(replace(TINY, layers=1), mesh, torch.float32)
    generator = torch.Generator(mesh.device_type).manual_seed(1)
    tokens = torch.randint(TINY.vocab - 1, (3, 12), generator=generator, device=mesh.device_type)
    position = torch.tensor([0, 5, 13], device=mesh.device_type)

    def last(tokens: torch.Tensor) -> torch.Tensor:
        cache = model.make_cache(3, 8).zero_()
        for i in (0, 4, 8):
            hidden = model.hidden(tokens[:, i : i + 4], position + i, cache)
        return hidden.view(3, 4, -1)

    changed = []
    for i in range(12):
        other = tokens.clone()
        other[:, i] += 1
        rows = (last(other) != last(tokens)).any(-1)
        assert (rows == rows[0]).all()  # wherever the requests are in their caches
        changed.append(rows[0].tolist())
    return changed


@worlds("cpu:1", "cpu:2", "cuda:1")
def test_what_a_token_sees(ranks):
    """Catches wrong masks and places in the cache: of 8 places 4 are taken by the new tokens."""
    new = [[j >= i for j in range(4)] for i in range(4)]
    for changed in ranks.run(seen):
        assert changed == [[False] * 4] * 4 + [[True] * 4] * 4 + new


def distances(mesh) -> list[torch.Tensor]:
    """Logits of the same tokens at other positions."""
    model = Model(TINY, mesh, torch.float32)
    tokens = torch.arange(12, device=mesh.device_type).expand(2, 12)
    cache = model.make_cache(2, 16).zero_()
    position = torch.tensor([0, 160], device=mesh.device_type)
    first, second = model.logits(model.hidden(tokens, position, cache)).view(2, 12, -1)
    return [first.cpu(), second.cpu(), first.flip(0).cpu()]


@worlds("cpu:2")
def test_only_distances_between_positions_matter(ranks):
    for first, second, other in ranks.run(distances):
        assert torch.allclose(first, second, atol=1e-3)
        assert not torch.allclose(first, other, atol=1e-1)


@worlds("cpu:1")
def test_logits_are_as_wide_as_is_said(ranks):
    """Catches a likely id that gets another probability, since the formula is of this deviation."""
    assert abs(ranks.run(deviation)[0] - LOGIT_STD) < 0.1


def deviation(mesh) -> float:
    model = Model(TINY, mesh, torch.float32)
    token, position = torch.arange(64).view(16, 4), torch.arange(16)
    return model.logits(model.hidden(token, position, model.make_cache(16, 8))).std().item()


@worlds("cpu:2")
def test_ranks_that_do_not_divide_the_model_are_refused(ranks):
    assert "2 ranks must divide 3 heads and 128 units" in ranks.run(refused)[0]


def refused(mesh) -> str:
    try:
        Model(replace(TINY, kv_heads=3), mesh, torch.float32)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--concurrency 4 0", "--concurrency"),
        ("--steps 0", "--steps"),
        ("--num-speculative-tokens -1", "--num-speculative-tokens"),
        ("--acceptance 1", "--acceptance"),
        ("--top-p 0", "--top-p"),
        ("--context 7", "--context"),
        ("--ways gather", "--ways"),
        ("--output no/such/folder", "--output"),
    ],
)
def test_bad_options_are_refused(capsys, given, named):
    with pytest.raises(SystemExit):
        bench_decode.parse(given.split(" "))
    assert named in capsys.readouterr().err


def test_what_does_not_pay_is_said():
    times = {"gather + sample": 10.0, "batch": 9.9, "vocab": 12.5, "replicate": 8.0}
    found = [{"K": 0, "concurrency": 4, "way": way, "itl_ms": time} for way, time in times.items()]
    said = bench_decode.verdict(found)
    assert "- slower: `vocab` at K = 0, concurrency 4: 20%." in said
    assert "- less than 2% apart: `batch` at K = 0, concurrency 4." in said
    assert "replicate" not in said
    assert "not measured" in bench_decode.verdict(found[1:])


def test_how_many_fit():
    found = [
        {"K": 0, "way": "batch", "concurrency": B, "peak_mib": 100 + 10 * B} for B in (2, 8, 4)
    ]
    bench_decode.estimate(found, 1100)
    assert {record["fits"] for record in found} == {100}

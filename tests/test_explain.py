"""What `explain` says: as counted by hand, as plans say, and clear about bad input."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtensor_sample import BatchSharder, SamplingParams, SamplingState
from dtensor_sample.__main__ import main, parser
from dtensor_sample.exchange import EXCHANGES
from dtensor_sample.predict import hardware
from tests.pool import worlds

STEP = ("--rows", "512", "--vocab", "129280", "--tp", "8", "--k", "7")


def explained(capsys, *options: str) -> dict[str, Any]:
    main(["explain", *options, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_figures_by_hand(capsys):
    """Catches bytes of another dtype, padding or share, counted by hand for 8 ranks."""
    found = explained(capsys, *STEP, "--hidden", "4096", "--slots", "100")
    assert (found["rows"], found["requests"], found["ranks"]) == (512, 64, 8)
    shard, cache = 512 * 16160 * 2, 7 * 129280 * 2
    of = found["exchanges"]
    assert [of[name]["logits_bytes"] for name in EXCHANGES] == [shard] * 3
    assert [of[name]["buffer_bytes"] for name in EXCHANGES] == [shard, 0, 8 * shard]
    assert [of[name]["hidden_bytes"] for name in EXCHANGES] == [512 * 4096 * 2] * 3
    # 13 slots an owner; under `vocab` a rank keeps an eighth of each row.
    kept = [13 * cache, 100 * cache // 8, 100 * cache]
    assert [of[name]["cache_bytes"] for name in EXCHANGES] == kept
    results = 64 * 12 * 8  # a token each of 8 places and 4 counts, in integers
    assert of["batch"]["wire_bytes"] == shard * 7 // 8 + results * 7 // 8
    assert of["replicate"]["wire_bytes"] == 7 * shard + 7 * results
    assert of["batch"]["collectives"] == ["all_to_all", "all_gather"]
    assert of["replicate"]["collectives"] == ["all_gather", "all_gather"]
    assert len(of["vocab"]["collectives"]) == 5
    for each in of.values():
        parts = ("logits", "buffer", "hidden", "cache", "scratch")
        assert each["peak_bytes"] == sum(each[f"{part}_bytes"] for part in parts)
        assert each["us"] > 0
    assert found["choice"] in EXCHANGES


def test_padding_counts(capsys):
    """Catches owners that are thought to be even: three requests of two ranks."""
    found = explained(capsys, "--rows", "12", "--vocab", "100", "--tp", "2", "--k", "3")
    of = found["exchanges"]
    assert [of[name]["num_rows"] for name in EXCHANGES] == [16, 12, 12]
    assert of["batch"]["owners"] == "4 to 8 by owners"
    last = explained(capsys, "--rows", "6", "--vocab", "100", "--tp", "2", "--k", "3")
    assert (last["requests"], last["exchanges"]["batch"]["num_rows"]) == (2, 8)


def test_a_budget_counts(capsys):
    """Catches rows of drafts that are beyond the budget: 64 requests of 8 ranks, 7 drafts each."""
    found = explained(capsys, *STEP, "--budget", "100")
    of = found["exchanges"]
    assert (found["rows"], found["requests"]) == (164, 64)
    # An owner has 8 requests with 56 drafts, all of which may be admitted.
    assert [of[name]["num_rows"] for name in EXCHANGES] == [512, 164, 164]
    of = explained(capsys, *STEP, "--budget", "10")["exchanges"]
    assert [of[name]["num_rows"] for name in EXCHANGES] == [8 * 18, 74, 74]
    assert of["batch"]["owners"] == "18 by each owner"
    assert explained(capsys, *STEP, "--budget", "448") == explained(capsys, *STEP)


def test_no_group_is_needed(capsys):
    """Catches a plan that talks, or asks the group for its size."""
    assert not dist.is_initialized()
    found = explained(capsys, "--rows", "4096", "--vocab", "151936", "--tp", "64")
    assert not dist.is_initialized()
    assert found["ranks"] == 64
    assert any("nodes of 8 ranks" in note for note in found["notes"])


def test_filters_cost(capsys):
    """Catches options that do not reach the estimate."""
    step = ("--rows", "64", "--vocab", "129280", "--tp", "2")

    def vocab(*options: str) -> tuple[int, float]:
        each = explained(capsys, *step, *options)["exchanges"]["vocab"]
        return len(each["collectives"]), each["us"]

    plain, few, searched = vocab(), vocab("--top-k", "50"), vocab("--top-p", "0.9")
    assert few < plain < searched < vocab("--top-k", "900", "--top-p", "0.9")
    assert (few[0], plain[0]) == (2, 3)  # lists bring all that is needed
    assert vocab("--top-k", "50", "--top-p", "0.9") == few  # one exchange finds both thresholds
    assert vocab("--filters", "both") == vocab("--filters", "top-k") == few
    assert vocab("--filters", "top-p") == searched
    assert vocab("--filters", "none") == plain
    assert vocab("--greedy") < plain
    assert vocab("--top-k", "1") == vocab("--top-p", "0") == vocab("--greedy")


def plan_figures(mesh, rows: list[int], K: int) -> list[dict[str, Any]]:
    """What a plan says of itself, under each exchange."""
    state = SamplingState(
        mesh, vocab_size=129280, max_num_reqs=100, num_speculative_tokens=K, seed=0
    )
    for slot in range(len(rows)):
        state.add(slot, SamplingParams(top_k=50))
    sharder = BatchSharder(state)
    results = []
    for exchange in EXCHANGES:
        plan = sharder.plan(range(len(rows)), rows, exchange=exchange)
        found = json.loads(json.dumps(plan.explain(torch.bfloat16, hidden=64).as_json()))
        cost = plan.cost(torch.bfloat16)
        assert found["taken"] == exchange
        assert found["exchanges"][exchange]["wire_bytes"] == cost.wire_bytes
        assert tuple(found["exchanges"][exchange]["collectives"]) == cost.collectives
        results.append(found)
    roomy = sharder.plan(range(len(rows)), rows, capacity=64).explain(torch.bfloat16)
    assert roomy.estimates[0].num_rows == 64 * mesh.size()
    return results


@worlds("cpu:4")
def test_plans_say_the_same(ranks, capsys, monkeypatch):
    """Catches two ways to count: the command line and a plan of the same step."""
    for k, total in ((0, 7), (3, 24)):
        rows = [k + 1] * (total // (k + 1))
        options = ["--rows", str(total), "--vocab", "129280", "--tp", "4", "--k", str(k)]
        wanted = explained(capsys, *options, "--top-k", "9", "--hidden", "64", "--gpu", "cpu")
        for results in ranks.run(plan_figures, rows, k):
            for found in results:
                assert found.pop("taken") in EXCHANGES
                assert found == wanted


BAD = {
    "rows": (["--rows", "0", "--vocab", "9", "--tp", "2"], "--rows: must be an integer in [1,"),
    "text": (["--rows", "x", "--vocab", "9", "--tp", "2"], "got x"),
    "missing": (["--rows", "1", "--vocab", "9"], "--tp"),
    "gpu": ([*STEP, "--gpu", "abacus"], "gpu must be one of"),
    "top-p": ([*STEP, "--top-p", "1.5"], "top_p must be a number in [0, 1]"),
    "both": ([*STEP, "--top-k", "5", "--filters", "none"], "--filters cannot be given with"),
    "greedy filters": ([*STEP, "--top-k", "5", "--greedy"], "--greedy cannot be given with"),
    "a budget of none": ([*STEP, "--k", "0", "--budget", "3"], "--budget must be given with --k"),
    "slots": (["--rows", "1", "--vocab", "9", "--tp", "2", "--slots", "3"], "needs --k"),
    "plot": ([*STEP, "--plot", "figure.gif"], "--plot must end in"),
    "folder": ([*STEP, "--plot", "/nowhere/figure.png"], "folder that exists"),
    "dtype": ([*STEP, "--dtype", "int8"], "--dtype"),
    "calibrate": (["--calibrate", "mine.txt"], "must be a .json file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, capsys):
    options, message = BAD[case]
    with pytest.raises(SystemExit) as ended:
        main(["explain", *options])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_spoiled_file(tmp_path, capsys):
    path = tmp_path / "mine.json"
    for text in ("", "[]", "{}", '{"mine": {"about": "x"}}', '{"mine": {"constants": {}}}'):
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["explain", *STEP, "--gpu", str(path)])
        assert ended.value.code == 2
        assert "--calibrate wrote" in capsys.readouterr().err
        hardware.cache_clear()


def test_table(capsys, monkeypatch):
    """With rich or without it, the same cells."""
    find = importlib.util.find_spec
    main(["explain", *STEP])
    rich = capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "rich" else find(n))
    main(["explain", *STEP])
    plain = capsys.readouterr().out
    assert "│" not in plain
    for text in ("13.8 MiB", "64 by each owner", "predicted time", "auto", "doubling of ranks"):
        assert text in plain
        assert text in rich
    assert max(map(len, plain.splitlines())) <= 100


def test_figure(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="the figure needs the extra `examples`")
    path = tmp_path / "figure.svg"
    main(["explain", *STEP, "--slots", "100", "--plot", str(path)])
    assert path.stat().st_size > 10_000
    monkeypatch.setattr("dtensor_sample.explain.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["explain", *STEP, "--plot", str(path)])
    assert ended.value.code == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_every_option_has_help():
    commands: Any = parser()._subparsers
    (group,) = commands._group_actions
    for action in group.choices["explain"]._actions:
        assert action.help, action.dest


def test_as_a_module(tmp_path):
    """Catches a package that cannot be run, and an error that is not the command's status."""
    command = [sys.executable, "-m", "dtensor_sample", "explain"]
    done = subprocess.run(
        [*command, *STEP, "--json"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["exchanges"]) == set(EXCHANGES)


# --- predicted time, against what was measured

DOCS = Path(__file__).parents[1] / "docs"

"""Every example that a reader may copy runs: of the guides, the README and the docstrings."""

import contextlib
import csv
import doctest
import importlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from options import parse_arguments
from torch.distributed.device_mesh import DeviceMesh

import dtensor_sample
from dtensor_sample import (
    BatchSharder,
    NgramDrafter,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    replicated,
)
from dtensor_sample.__main__ import main
from dtensor_sample.process import Processor
from tests.batches import shard_vocab
from tests.pool import worlds

ROOT = Path(__file__).parents[1]
GUIDES = sorted(p.name for p in (ROOT / "docs").glob("*.md") if "```python" in p.read_text())
V, H = 40, 8


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def execute(name: str, parts: list[str], given: dict[str, Any]) -> str:
    """Run the blocks of a page one after another; return what they print."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for number, part in enumerate(parts, start=1):
            exec(compile(part, f"{name}, example {number}", "exec"), given)
    return printed.getvalue()


def run_guide(mesh: DeviceMesh, name: str) -> str:
    """Run a page as the script that it is, but for its last line, since the ranks are needed."""
    parts = blocks((ROOT / "docs" / name).read_text(), "python")
    assert parts[-1].endswith("\ndist.barrier()\ndist.destroy_process_group()\n")
    with mock.patch.object(dist, "destroy_process_group") as ended:
        printed = execute(name, parts, {})
    ended.assert_called_once_with()
    return printed


def test_every_example_is_run():
    """Catches Python that is in no script: on other pages, indented, or fenced in other ways."""
    scripts = {ROOT / "README.md", *(ROOT / "docs" / name for name in GUIDES)}
    fence = re.compile(r"^[ \t>]*(?:`{3,}|~{3,})[ {]*(?:code-block} *)?py", re.MULTILINE)
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = page.read_text()
        run = len(blocks(text, "python")) if page in scripts else 0
        assert len(fence.findall(text)) == run, page.name


@worlds("cpu:4")
@pytest.mark.parametrize("name", GUIDES)
def test_guides(ranks, name):
    printed = ranks.run(run_guide, name)
    assert len(set(printed)) == 1


def logits_of(mesh: DeviceMesh, rows: int, dims: tuple[int, ...] = ()) -> Any:
    noise = torch.randn(rows, *dims, V, generator=torch.Generator().manual_seed(rows))
    return replicated(noise.to(mesh.device_type), mesh)


def run_readme(mesh: DeviceMesh) -> tuple[list[int], str]:
    """The script after its three-line change, and the engine, with what they take for granted."""
    text = (ROOT / "README.md").read_text()
    diff = blocks(text, "diff")[0]  # the others are held to the examples: test_integrations.py
    script = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    given: dict[str, Any] = {
        "model": lambda tokens: logits_of(mesh, len(tokens), (3,)),
        "tokens": torch.zeros(2, 3),
        "position": 3,
    }
    execute("README.md, diff", [script], given)
    engine = {
        "mesh": mesh,
        "V": V,
        "slot": 0,
        "slots": [0],
        "prompt": [1, 2],
        "hidden": torch.zeros(1, H),
        "text": torch.tensor([[2, 5, 7, 2, 9]]),
        "confidences": torch.full((1, 4), 0.5),
        "backbone": lambda ids: torch.zeros(len(ids), H),
        "block_hidden": torch.zeros(1, 4, H),
        "last_token_ids": [2],
        "w1": torch.zeros(V, 2),
        "w2": torch.zeros(2, V),
        "lm_head": lambda rows: logits_of(mesh, len(rows), tuple(rows.shape[1:-1])),
    }
    return given["next_token"].tolist(), execute("README.md", blocks(text, "python"), engine)


@worlds("cpu:1", "cpu:4")
def test_readme(ranks):
    for tokens, printed in ranks.run(run_readme):
        assert len(tokens) == 2
        assert all(0 <= token < V for token in tokens)
        assert "collectives" in printed


def run_docstrings(mesh: DeviceMesh) -> tuple[int, str]:
    """Examples of public names; those marked to be skipped too, with what they take for granted."""
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=2, num_speculative_tokens=4, seed=0)
    texts = [[7, 1, 2, 3, 9, 1, 2], [4]]
    for slot, text in enumerate(texts):
        state.add(slot, SamplingParams(), prompt_token_ids=text)
    sharder, drafter = BatchSharder(state), NgramDrafter()
    drafts, _ = drafter.propose([0, 1], texts, [4, 4])
    rows = sharder.plan([0, 1], [1 + len(own) for own in drafts]).num_rows
    given = {
        **vars(dtensor_sample),
        "mesh": {"tp": mesh},
        "logits": logits_of(mesh, rows),
        "slots": [0, 1],
        "texts": texts,
        "drafter": drafter,
        "sharder": sharder,
        "verifier": RejectionSampler(state),
        "state": state,
        "sampler": Sampler(state),
        "hidden": torch.ones(2, V),
        "torch": torch,
        "last_ids": torch.tensor([2, 4]),
        "draft_ids": torch.tensor([[3, 9, 1, 2], [4, 4, -1, -1]]),
        "confidences": torch.full((2, 4), 0.5),
        "backbone": lambda ids: torch.ones(len(ids), V),
        "lm_head": lambda hidden: shard_vocab(hidden, mesh),
    }
    report = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    found = 0
    for name in (*dtensor_sample.__all__, "Processor"):
        public = getattr(dtensor_sample, name, Processor)
        module = importlib.import_module(getattr(public, "__module__", "dtensor_sample"))
        for test in doctest.DocTestFinder().find(public, name, module=module, globs=dict(given)):
            for example in test.examples:
                example.options.pop(doctest.SKIP, None)
            runner.run(test, out=report.write)
            found += len(test.examples)
    return found, report.getvalue()


@worlds("cpu:1", "cpu:4")
def test_docstrings(ranks):
    for found, report in ranks.run(run_docstrings):
        assert found >= 10
        assert not report, report


def test_figure(tmp_path, monkeypatch):
    """They draw themselves, and say which requests each rank owns and what is predicted."""
    pytest.importorskip("matplotlib", reason="the figure needs the extra `docs`")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    figures: SimpleNamespace = importlib.import_module("figures")  # type: ignore[assignment]
    monkeypatch.delitem(sys.modules, "figures")
    figures.draw(tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    for label in ("rank 3", "token of 7", "its own rows, all columns"):
        assert label in text
    figures.draw_predictions(tmp_path / "times.svg")
    text = (tmp_path / "times.svg").read_text()
    for label in ("batch", "vocab", "replicate", "512 rows, no filter", "predicted us"):
        assert label in text


def test_commands_can_be_pasted(monkeypatch):
    """Every `make decode` of the README and the guides has options that exist, and files too."""
    monkeypatch.chdir(ROOT)
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    text = "\n".join(page.read_text() for page in pages)
    found = re.findall(r"^make decode ARGS='(.*)'$", text, re.MULTILINE)
    for command in found:
        monkeypatch.setattr(sys, "argv", ["decode.py", *shlex.split(command)])
        args = parse_arguments()
        for path in (args.model, args.draft_model, args.json_schema, args.prompt_file):
            assert path is None or path.exists(), command
    assert len(found) >= 5


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    """Catches pages, figures and headings that were renamed or forgotten."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    links = 0
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path) if path else page
            assert file.is_file(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(file.read_text()), f"{page.name}: {target}"
            links += 1
    assert links > 10


def test_figures_of_the_guide_are_those_of_the_report():
    """Catches a guide that was left behind by a newer report."""
    text = (ROOT / "docs" / "choosing_an_exchange.md").read_text()
    (report,) = set(re.findall(r"\]\((\S+-bench-\S+)\.md\)", text))
    with (ROOT / "docs" / f"{report}.csv").open() as file:
        found = [r for r in csv.DictReader(file) if (r.get("k") or "0") == "0"]
    records = {(r["rows"], r["filters"], r["way"]): r for r in found}
    ways = ("batch", "vocab", "replicate", "gather + sample")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| (.* us, .* MiB) \|$", text, re.MULTILINE)
    assert len(rows) == 8
    for count, filters, cells in rows:
        for way, cell in zip(ways, cells.split(" | "), strict=True):
            record = records[count, "off" if filters == "none" else "on", way]
            us, mib = cell.removesuffix(" MiB").split(" us, ")
            assert abs(float(us) - float(record["us"])) <= 0.5, (count, filters, way)
            assert abs(float(mib) - float(record["extra_mib"])) <= (0.05 if "." in mib else 0.5)


def test_figures_of_the_readme_are_those_of_the_report():
    """The same of the README: its table of steps, and what it says of the host's time."""
    text = (ROOT / "README.md").read_text()
    with (ROOT / "docs" / "2026-11-30-bench-h200-x2.csv").open() as file:
        found = list(csv.DictReader(file))
    us = {(r["k"], r["filters"], r["way"], r["rows"]): float(r["us"]) for r in found}
    part = re.findall(r"^\| us a step .*?\n\n", text, re.DOTALL | re.MULTILINE)[0]
    cells_of = [[c.strip() for c in line.split("|")[1:-1]] for line in part.splitlines()[:-1]]
    header, _, *lines = cells_of
    rows = [cell.split()[0] for cell in header[1:-1]]
    kinds = ["0 off"] * 4 + ["0 on"] * 3 + ["7 off"] * 2
    for kind, (name, *cells, _) in zip(kinds, lines, strict=True):
        way = "gather + sample" if name.startswith("gather") else name.split("`")[1]
        for count, cell in zip(rows, cells, strict=True):
            measured = us[(*kind.split(), way, count)]
            assert abs(float(cell) - measured) <= 0.5, (name, count)
    for drafts, told in {"0": "0.6 to 2.3 ms of host", "7": "verifies them 6.2 to 16"}.items():
        own = [r for r in found if r["k"] == drafts and r["way"] in ("batch", "vocab", "replicate")]
        ms = sorted(float(r["host_us"]) / 1000 for r in own)
        least, most = map(float, re.findall(r"[\d.]+", told))
        assert told in text
        assert (round(ms[0], 1), round(ms[-1], 1 if most < 10 else 0)) == (least, most)


def test_explained_step_of_the_guide(capsys, monkeypatch):
    """Catches a guide whose counts are not what the command prints; times are fitted anew."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no rich: plain text
    command, printed = re.findall(
        r"^```\n(python -m dtensor_sample explain .*?)\n```\n\n```\n(.*?)^```",
        (ROOT / "docs" / "choosing_an_exchange.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )[0]
    main(command.split()[3:])

    def counts(text: str) -> list[str]:
        fitted = ("predicted time", "choice", "time:")
        return [line for line in text.splitlines() if not line.startswith(fitted)]

    assert counts(capsys.readouterr().out) == counts(printed)


@pytest.mark.slow
def test_pages_build_without_warnings(tmp_path):
    pytest.importorskip("sphinx", reason="the pages need the extra `docs`")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", tmp_path / "trees"]
    done = subprocess.run(
        [*command, ROOT / "docs", tmp_path / "html"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Draw one token" in (tmp_path / "html" / "api" / "stateless.html").read_text()


def test_decode_loops_of_the_readme_are_those_of_the_report():
    text = (ROOT / "README.md").read_text()
    with (ROOT / "docs" / "2026-11-30-decode-h200-x2.csv").open() as file:
        found = {(r["K"], r["way"], r["concurrency"]): r for r in csv.DictReader(file)}
    part = re.findall(r"^\| output tokens/s .*?\n\n", text, re.DOTALL | re.MULTILINE)[0]
    header, _, *lines = [
        line.split(" | ")[1:] for line in part.strip().removesuffix("|").split("|\n")
    ]
    kinds = [("0", "gather + sample"), ("0", "batch"), ("7", "gather + sample"), ("7", "batch")]
    for (drafts, way), cells in zip(kinds, lines, strict=True):
        for column, cell in zip(header, cells, strict=True):
            at = column.split()[0]
            speed, base = (
                float(found[drafts, name, at]["tokens_per_s"]) for name in (way, "gather + sample")
            )
            told, *gain = re.findall(r"[-+]?[\d.]+", cell)
            assert abs(float(told) - speed) <= 0.5, (way, at)
            assert abs(float(gain[0] if gain else 0) - (speed / base - 1) * 100) <= 0.7, (way, at)

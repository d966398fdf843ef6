"""How long one sampling step takes, from vocabulary-sharded logits to tokens on every rank.

    torchrun --nproc_per_node=2 examples/bench.py --num-speculative-tokens 0 7 --output docs/NAME
    torchrun --nproc_per_node=2 examples/bench.py --draft-loop   # blocks drafted left to right
    python examples/bench.py --rows 4 --vocab 1000 --rounds 3    # a CPU will do, on one rank too

Each step is done in several ways: by this library under each exchange and under "auto", which takes
one of them, as scripts do it that gather the logits and sample every row on every rank, and by one
all-to-all with a Gumbel number per logit. With K speculative tokens a step draws K drafts for each
request from draft logits and verifies them in the rows of target logits, K + 1 a request. First all
ways are checked: the exchanges must give equal tokens, and greedy tokens must be the largest
logits. Then the ways take turns, on a GPU each as one CUDA graph, and the slowest rank counts.
`--output` writes NAME.csv, NAME.md and NAME.png.
"""

import argparse
import csv
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_drafts
import torch
from bench_report import Record, about, join, markdown, show, write
from bench_timing import timings
from bench_ways import OWN, check, ways
from ending import end_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_sample import SamplingParams, vocab_sharded
from dtensor_sample.calibrate import timer
from dtensor_sample.params import filters_of

FILTERS = {
    "off": SamplingParams(),
    "on": SamplingParams(top_k=50, top_p=0.95),
    "top-p": SamplingParams(top_p=0.95),
}
FILTERS_SAID = "on is top-k 50 and top-p 0.95, top-p is 0.95 alone"
NOISE = 0.5
"""Standard deviation of what draft logits differ by from the target's, theirs being 2."""
COLUMNS = {
    "rows": "rows",
    "filters": "filters",
    "way": "way",
    "exchange": "exchange",
    "us": "us, median",
    "us_20": "20%",
    "us_80": "80%",
    "us_99": "99%",
    "ratio": "x floor",
    "gb_per_s": "GB/s",
    "host_us": "host us, eager",
    "extra_mib": "extra MiB",
    "ranks": "ranks",
    "vocab": "ids",
    "dtype": "dtype",
    "k": "K",
    "drafts": "drafts",
    "candidates": "candidates",
}
"""Fields of the CSV, and what the table calls them."""


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        metavar="N",
        help="of target logits; those that are no whole requests of K + 1 rows are left out; with "
        "--draft-loop: requests",
    )
    parser.add_argument(
        "--vocab", type=int, nargs="+", default=[129280], metavar="V", help="default 129280"
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        nargs="+",
        metavar="K",
        help="drafts of a request, default 0, with --draft-loop 5 and 7",
    )
    parser.add_argument(
        "--drafts",
        default="drafted",
        choices=["drafted", "one-hot"],
        help="drafted in the step, from draft logits (the default), or chosen and only verified",
    )
    parser.add_argument(
        "--draft-loop",
        action="store_true",
        help="only draft: K tokens a request, each of which adds a bias to the logits after it",
    )
    parser.add_argument(
        "--factors", type=int, default=256, metavar="R", help="rank of that bias, default 256"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--filters",
        nargs="+",
        default=["off", "on"],
        choices=list(FILTERS),
        help=f"default off on; {FILTERS_SAID}",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=30,
        metavar="N",
        help="default 30; from 100 on the 99th percentile is reported too",
    )
    parser.add_argument("--output", type=Path, metavar="NAME", help="write NAME.csv, .md and .png")
    parser.add_argument("--draw", type=Path, metavar="CSV", help="only draw what was measured once")
    args = parser.parse_args(given)
    args.rows = args.rows or ([1, 8, 64, 256] if args.draft_loop else [4, 64, 512, 2048])
    drafts = args.num_speculative_tokens or ([5, 7] if args.draft_loop else [0])
    args.num_speculative_tokens = drafts
    if min(*args.rows, *args.vocab, args.factors) < 1:
        parser.error("--rows and --vocab must be at least 1, and --factors")
    if args.rounds < 2:
        parser.error("--rounds must be at least 2")
    for K in args.num_speculative_tokens:
        if K < 0:
            parser.error("--num-speculative-tokens must be at least 0")
        if args.draft_loop and K == 0:
            parser.error("--draft-loop: --num-speculative-tokens must be at least 1")
        if not args.draft_loop and all(rows % (K + 1) for rows in args.rows):
            parser.error(
                f"--num-speculative-tokens {K}: one of --rows must be a multiple of {K + 1}"
            )
    if args.output is not None and not args.output.parent.is_dir():
        parser.error(f"--output: no folder {args.output.parent}")
    if args.draw is not None and not args.draw.is_file():
        parser.error(f"--draw: no file {args.draw}")
    return args


def make_logits(
    mesh: DeviceMesh, rows: int, V: int, K: int, dtype: torch.dtype
) -> tuple[DTensor, list[DTensor]]:
    """The target's logits [T, V], and K blocks of draft logits [B, V] that are near to them."""
    rank, width = mesh.get_local_rank(), -(-V // mesh.size())
    columns = max(min(width, V - rank * width), 0)
    generator = torch.Generator(mesh.device_type).manual_seed(rank)

    def random(count: int) -> Tensor:
        return torch.randn(count, columns, generator=generator, device=mesh.device_type)

    def sharded(local: Tensor) -> DTensor:
        return vocab_sharded(local.to(dtype), mesh, vocab_size=V)

    local_Tv = random(rows).mul_(2)
    near = [local_Tv[k :: K + 1] + NOISE * random(rows // (K + 1)) for k in range(K)]
    return sharded(local_Tv), [sharded(local_Bv) for local_Bv in near]


def bytes_per_us(device: str) -> float:
    """What a copy of much memory reads and writes."""
    source = torch.empty(2**30 if device == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    run = timer(lambda: target.copy_(source), device)
    return 2 * source.nbytes / statistics.median(run() for _ in range(10))


def measure(mesh: DeviceMesh, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each vocabulary, number of drafts and of rows, filters and way."""
    device, dtype = mesh.device_type, getattr(torch, args.dtype)
    speed = bytes_per_us(device)
    for V, K, rows in itertools.product(args.vocab, args.num_speculative_tokens, args.rows):
        if rows % (K + 1):
            continue
        target, drafts = make_logits(mesh, rows, V, K, dtype)
        if args.drafts == "one-hot":
            drafts = []
        nbytes = (rows + rows // (K + 1) * len(drafts)) * V * dtype.itemsize / mesh.size()
        for filters in args.filters:
            if mesh.get_rank() == 0:
                print(f"V={V} K={K} rows={rows} filters={filters}", file=sys.stderr, flush=True)
            check(mesh, target, K, drafts, FILTERS[filters])
            found = dict(ways(mesh, target, K, drafts, FILTERS[filters]))
            for name, timed in timings(found, args.rounds, device):
                yield {
                    "rows": rows,
                    "filters": filters,
                    "way": name,
                    "exchange": found[name].exchange,
                    **timed,
                    "ratio": round(timed["us"] * speed / nbytes, 1),
                    "gb_per_s": round(nbytes / timed["us"] / 1e3, 1),
                    "ranks": mesh.size(),
                    "vocab": V,
                    "dtype": args.dtype,
                    "k": K,
                    "drafts": args.drafts if K else None,
                    "candidates": filters_of([FILTERS[filters]]).candidates,
                }


def report(records: Sequence[Record], args: argparse.Namespace, mesh: DeviceMesh) -> str:
    """The records as Markdown, and how they came about."""
    graph = mesh.device_type == "cuda"
    if args.draft_loop:
        facts = {
            "logits": args.dtype,
            "filters": FILTERS_SAID,
            "a step": "one replay of a CUDA graph" if graph else "one eager call",
            "it": "draws K tokens a request from base logits of all positions, each after a bias "
            "of the token before; kept as they were drawn from",
            "gather + loop": "the same in PyTorch, on every rank",
        }
        title = "Blocks of drafts left to right, from sharded base logits to tokens on every rank"
        said = about(mesh, "bench.py", **facts)
        return markdown(title, said, bench_drafts.COLUMNS, records)
    facts = {
        "logits": args.dtype,
        "filters": FILTERS_SAID,
        "a step": "one replay of a CUDA graph" if graph else "one eager call",
        "with K > 0": "K drafts for each of rows / (K + 1) requests, from the target's logits plus "
        f"normal noise of {NOISE} (their own deviation is 2), and block verification; standard "
        "rejection sampling in PyTorch; one-hot drafts are some ids, and only verified",
        "extra MiB": "what a rank holds at most beyond the logits, kept draft logits included",
        "floor": "the time in which a copy moves as many bytes as a rank's part of the logits has",
    }
    title = "One sampling step, from sharded logits to tokens on every rank"
    return markdown(title, about(mesh, "bench.py", **facts), COLUMNS, records)


def draw(records: Sequence[Record], path: Path) -> None:
    """A picture of time and of memory over rows, a line of panels for each vocabulary and K."""
    from matplotlib.figure import Figure

    panels = [
        ("us", "off", "microseconds a step, no filter"),
        ("us", "on", "the same, top-k 50 and top-p 0.95"),
        ("extra_mib", "on", "MiB beyond the logits, with filters"),
    ]
    names = list(dict.fromkeys(record["way"] for record in records))
    # Earlier files have one vocabulary, and no drafts.
    kinds = [(str(record.get("vocab", "")), str(record.get("k") or 0)) for record in records]
    lines = list(dict.fromkeys(kinds))
    figure = Figure(figsize=(13, 4.2 * len(lines)), dpi=150, layout="constrained")
    grid = figure.subplots(len(lines), 3, squeeze=False)
    for (line, axes), (panel, (field, filters, title)) in itertools.product(
        zip(lines, grid, strict=True), enumerate(panels)
    ):
        ax = axes[panel]
        for i, name in enumerate(names):
            points = [
                (int(record["rows"]), float(record[field]))
                for record, kind in zip(records, kinds, strict=True)
                if (kind, record["way"], record["filters"]) == (line, name, filters)
                and float(record[field] or 0) > 0  # a logarithm has no place for the others
            ]
            if points:
                own = name in OWN
                ax.plot(
                    *zip(*points, strict=True), "o-" if own else "s--", label=name, color=f"C{i}"
                )
        V, K = line
        labels = [f"V = {V}"] * (len({v for v, _ in lines}) > 1) + [f"K = {K}"] * (len(lines) > 1)
        ax.set(xscale="log", yscale="log", xlabel="rows", title=", ".join([title, *labels]))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    args = parse()
    if args.draw is not None:
        with args.draw.open(newline="") as file:
            draw(list(csv.DictReader(file)), args.draw.with_suffix(".png"))
        return
    mesh = join()
    records = []
    columns, made = COLUMNS, measure(mesh, args)
    if args.draft_loop:
        columns = bench_drafts.COLUMNS
        made = bench_drafts.measure(mesh, args, FILTERS)
    with torch.inference_mode():
        for record in made:
            records.append(record)
            show(record)
    if args.output is not None and mesh.get_rank() == 0:
        write(args.output, columns, records, report(records, args, mesh))
        if not args.draft_loop and importlib.util.find_spec("matplotlib") is not None:
            draw(records, args.output.with_suffix(".png"))
    end_ranks()


if __name__ == "__main__":
    main()

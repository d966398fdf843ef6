"""Fits the constants of the cost model to measured steps, and says how well it predicts others.

    python docs/fit_cost.py                        # fit to FILES, check and print
    python docs/fit_cost.py --write                # and put the constants into the package
    python docs/fit_cost.py docs/NAME.csv          # what other measurements say

Reads any CSV that `examples/bench.py --output` writes (`dtensor_sample/calibrate.py` lists the
columns). Each number of rows is also predicted by a fit to all the others: what that errs by is
what the model is worth between and beyond what was measured.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dtensor_sample.calibrate import Measurement, fit_to, read
from dtensor_sample.predict import CONSTANTS, TABLE, Hardware, hardware, names, write

FILES = {
    "h200": [
        "2026-11-30-bench-h200-x2.csv",
        "2026-11-30-top-p-h200-x2.csv",
        "2026-11-30-verify-h200.csv",
    ],
    "cpu": ["2026-11-30-bench-cpu-x2.csv"],
}
"""What the table is fitted to, in this folder."""
NOTHING = dict.fromkeys(CONSTANTS, 0.0)
ASSUMED = {
    "h200": Hardware(
        name="h200",
        about="2 x H200, nccl, torch 2.11, 2026-11-30",
        constants=NOTHING,
        hop_us=4.0,
        node_ranks=8,
        node_bytes_per_us=45_000.0,
    ),
    "cpu": Hardware(
        name="cpu",
        about="2 ranks on 2 shared CPU cores, gloo, torch 2.13, eager, 2026-11-30",
        constants=NOTHING
        | {"largest_us_per_million": 660_000.0, "nucleus_us_per_million": 470_000.0},
        hop_us=200.0,
        node_ranks=64,
        node_bytes_per_us=1_000.0,
    ),
}
"""What the files were measured on, and what they do not tell: on CPUs the largest values of shards,
taken to be no faster than the histograms that they replace, and top-p alone, one search of two; a
few us more of a collective for more ranks;
and between nodes 400 Gb/s a GPU (less what protocols take) or 10 Gb/s a CPU."""


def measurements(machine: str) -> list[Measurement]:
    """All steps that the constants of a machine are fitted to."""
    return [m for name in FILES[machine] for m in read(Path(__file__).with_name(name))]


def held_out(measured: Sequence[Measurement], assumed: Hardware) -> list[tuple[Measurement, float]]:
    """Each step, and what a fit to steps with other numbers of rows predicts for it.

    Steps whose number of drafts was measured with one number of rows only are left out.
    """
    found = []
    for rows in sorted({m.rows for m in measured}):
        others = [m for m in measured if m.rows != rows]
        machine = fit_to(others, assumed)
        known = {m.K for m in others}
        found += [
            (m, machine.us(m.cost, m.ranks)) for m in measured if m.rows == rows and m.K in known
        ]
    return found


def error(m: Measurement, us: float) -> float:
    """By what part of the measured time a prediction is off."""
    return abs(us / m.us - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", metavar="CSV", help="default: FILES")
    parser.add_argument("--machine", default="h200", choices=list(ASSUMED), help="default h200")
    parser.add_argument("--write", action="store_true", help="replace its entry of hardware.json")
    parser.add_argument("--about", help="what was measured (default: as ASSUMED says)")
    args = parser.parse_args()
    measured = [m for path in args.files for m in read(path)] or measurements(args.machine)
    assumed = ASSUMED[args.machine]
    machine = fit_to(measured, assumed)
    for name, value in machine.constants.items():
        print(f"{name:24} {value:10.4f}")
    guesses = held_out(measured, assumed)
    print("\nrows  ranks  k  filters  exchange    measured  fitted  held out")
    for m, guess in guesses:
        fitted = machine.us(m.cost, m.ranks)
        print(
            f"{m.rows:5} {m.ranks:5} {m.K:3}  {m.filters:7}  "
            f"{m.exchange:10} {m.us:9.1f} {fitted:7.0f} {guess:9.0f}"
        )
    errors = [error(m, us) for m, us in guesses]
    print(
        f"median error of those held out: {statistics.median(errors):.1%}, most {max(errors):.1%}"
    )
    if args.write:
        about = args.about or assumed.about
        others = [hardware(name) for name in names() if name != args.machine]
        table = [*others, replace(machine, about=about)]
        write(TABLE, sorted(table, key=lambda each: each.name, reverse=True))


if __name__ == "__main__":
    main()

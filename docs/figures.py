"""Draws the figures of the guides, as `make docs` does.

    python docs/figures.py [FOLDER]

"How it works" shows vocabulary shards that become batch shards: the owners in the picture are those
that the library assigns. "Choosing an exchange" shows how well time is predicted, and what it is
predicted to be on more ranks than were measured.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from fit_cost import ASSUMED, held_out, measurements
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from dtensor_sample.exchange import EXCHANGES
from dtensor_sample.predict import hardware
from dtensor_sample.sharder import assign_owners

RANKS, REQUESTS = 4, 8
COLORS = ("#2a6f97", "#e07a3f", "#6a994e", "#bc4b6b")
"""Of the rank that owns a row."""
ROW, COLUMN = 1.0, 3.0
"""Height of a row of logits, and width of a rank's part of the vocabulary."""
MANY_RANKS = (2, 4, 8, 16, 32, 64)
MANY_US = (100, 200, 500, 1000, 2000)
SCALED = ((64, "off"), (512, "off"), (512, "on"))
"""Rows, and filters."""
PANEL = REQUESTS * ROW + 2.2
"""Height of a rank's panel, the space below it included."""


def draw(path: Path) -> None:
    """Write the figure of shards, an SVG (with text as text) or a PNG."""
    slots = range(REQUESTS)
    no_drafts = [None] * REQUESTS
    owners = assign_owners("balanced", slots, [1] * REQUESTS, no_drafts, [REQUESTS] * RANKS)
    # Rows come owner after owner, in batch order within each.
    order = sorted(slots, key=lambda i: (owners[i], i))

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "x", "font.size": 9}):
        figure = Figure(figsize=(9, 7.2), dpi=100, layout="constrained")
        ax = figure.subplots()
        ax.set_axis_off()
        middle, right = COLUMN + 5.5, COLUMN + 5.5 + RANKS * COLUMN + 4.5
        for rank in range(RANKS):
            top = -rank * PANEL
            ax.text(-1.6, top - REQUESTS * ROW / 2, f"rank {rank}", ha="right", va="center")
            for place, request in enumerate(order):
                y = top - (place + 1) * ROW
                color = COLORS[owners[request]]
                _cell(ax, 0, y, color, str(request))
            own = [i for i in order if owners[i] == rank]
            y = top - (REQUESTS + len(own)) * ROW / 2
            for place, request in enumerate(reversed(own)):
                for source in range(RANKS):
                    at = (middle + source * COLUMN, y + place * ROW)
                    _cell(ax, *at, COLORS[rank], str(request))
            for request in slots:
                at = (right, top - (request + 1) * ROW)
                _cell(ax, *at, COLORS[owners[request]], f"token of {request}")
        height = (RANKS - 1) * PANEL + REQUESTS * ROW
        for x, text in (
            (COLUMN + 0.4, "one\nall-to-all"),
            (middle + RANKS * COLUMN + 0.2, "draw, then\none small\nall-gather"),
        ):
            y = -height / 2
            ax.add_patch(
                FancyArrowPatch(
                    (x, y), (x + 4.4, y), arrowstyle="-|>", mutation_scale=18, lw=1.5, color="black"
                )
            )
            ax.text(x + 2, y + 0.7, text, ha="center", va="bottom")
        for x, text in (
            (COLUMN / 2, "its columns\nof all rows"),
            (middle + RANKS * COLUMN / 2, "its own rows, all columns"),
            (right + COLUMN / 2, "all tokens,\nin batch order"),
        ):
            ax.text(x, 0.7, text, ha="center", va="bottom", weight="bold")
        ax.set_xlim(-5, right + COLUMN + 1)
        ax.set_ylim(-height - 1, 3.2)
        _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Without a date or a version, so that only what is drawn can differ."""
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(path, facecolor="white", metadata=no_metadata if path.suffix == ".svg" else None)


def _cell(ax: Any, x: float, y: float, color: str, text: str) -> None:
    """A rank's part of a row of logits, or a token."""
    ax.add_patch(Rectangle((x, y), COLUMN, ROW, facecolor=color, edgecolor="white", lw=0.8))
    ax.text(x + COLUMN / 2, y + ROW / 2, text, ha="center", va="center", color="white", size=7)


def draw_predictions(path: Path) -> None:
    """Write the figure of predicted times, likewise."""
    measured = [m for m in measurements("h200") if m.K == 0]
    colors = dict(zip(EXCHANGES, COLORS, strict=False))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "x", "font.size": 9}):
        figure = Figure(figsize=(13, 3.8), dpi=100, layout="constrained")
        first, *others = figure.subplots(1, 1 + len(SCALED))
        guesses, ends = held_out(measurements("h200"), ASSUMED["h200"]), (60.0, 5000.0)
        first.plot(ends, ends, color="black", lw=0.8)
        first.fill_between(ends, [0.85 * x for x in ends], [1.15 * x for x in ends], alpha=0.15)
        for name, color in colors.items():
            own = [(m.us, us) for m, us in guesses if m.exchange == name]
            first.plot(*zip(*own, strict=True), "o", color=color, label=name)
        first.set(xlabel="measured us", ylabel="predicted us", xscale="log", yscale="log")
        first.set_title("2 ranks: held-out rows, and +- 15%")
        for ax, (rows, filters) in zip(others, SCALED, strict=True):
            for name, color in colors.items():
                same = [m for m in measured if (m.exchange, m.filters) == (name, filters)]
                costs = [replace(same[0], rows=rows, ranks=P).cost for P in MANY_RANKS]
                us = map(hardware("h200").us, costs, MANY_RANKS)
                ax.plot(MANY_RANKS, list(us), color=color, label=name)
                found = [m.us for m in same if m.rows == rows]
                ax.plot([2] * len(found), found, "o", color=color)
            ax.axvline(8, color="grey", lw=0.8, ls=":")
            ax.set_title(f"{rows} rows, {'no filter' if filters == 'off' else 'top-k and top-p'}")
            ax.set(xlabel="ranks", ylabel="predicted us", xscale="log", yscale="log")
            ax.set_xticks(MANY_RANKS, [str(P) for P in MANY_RANKS])
            ax.set_yticks(MANY_US, [str(us) for us in MANY_US])
            ax.set_ylim(60, 2000)
            ax.minorticks_off()
        for ax in (first, *others):
            ax.spines[["top", "right"]].set_visible(False)
            ax.legend(frameon=False, fontsize=8)
        _save(figure, path)


def main() -> None:
    """Draw into the folder named by the first argument, by default this file's."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    draw(folder / "vocabulary-to-batch.svg")
    draw_predictions(folder / "predicted-times.svg")


if __name__ == "__main__":
    main()

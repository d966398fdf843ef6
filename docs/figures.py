"""Draws the figure of the guide "How it works": vocabulary shards become batch shards.

The owners in the picture are those that the library assigns. `make docs` runs it; so does

    python docs/figures.py [FOLDER]
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from dtensor_sample.sharder import assign_owners

RANKS, REQUESTS = 4, 8
COLORS = ("#2a6f97", "#e07a3f", "#6a994e", "#bc4b6b")
"""Of the rank that owns a row."""
ROW, COLUMN = 1.0, 3.0
"""Height of a row of logits, and width of a rank's part of the vocabulary."""
PANEL = REQUESTS * ROW + 2.2
"""Height of a rank's panel, the space below it included."""


def draw(path: Path) -> None:
    """Write the figure, an SVG (with text as text) or a PNG."""
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
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(
            path, facecolor="white", metadata=no_metadata if path.suffix == ".svg" else None
        )


def _cell(ax: Any, x: float, y: float, color: str, text: str) -> None:
    """A rank's part of a row of logits, or a token."""
    ax.add_patch(Rectangle((x, y), COLUMN, ROW, facecolor=color, edgecolor="white", lw=0.8))
    ax.text(x + COLUMN / 2, y + ROW / 2, text, ha="center", va="center", color="white", size=7)


def main() -> None:
    """Draw into the folder named by the first argument, by default this file's."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    draw(folder / "vocabulary-to-batch.svg")


if __name__ == "__main__":
    main()

"""A picture of a run: what drafts brought, or else where the time of its steps went."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".pdf", ".svg")
TAKEN, LEFT = "#2a6f97", "#d5dde3"
PARTS = ("#2a6f97", "#e07a3f", "#6a994e", "#bc4b6b", "#8d7cb8", "#c2a83e")


def check_plot(path: Path) -> None:
    """Raise ValueError unless a picture can be written there."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--plot must end in {', '.join(SUFFIXES)}, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot must lie in a folder that exists, got {path}")
    if path.is_dir():
        raise ValueError(f"--plot must be a file, got the folder {path}")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")


def draw_plot(path: Path, figures: Mapping[str, Any], steps: Sequence[Mapping[str, float]]) -> None:
    """Write the picture of a run.

    Args:
        path: what `check_plot` accepts.
        figures: of the run, as --json reports them.
        steps: milliseconds of each part of each step.
    """
    # Without pyplot there is no screen: Agg draws, or the PDF or SVG backend.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    title = "{model} on {ranks} x {device}, {dtype}, exchange {exchange}".format_map(figures)
    axes = figure.subplots(1, 2)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    if "speculation" in figures:
        speculation = figures["speculation"]
        title += "\ndrafts by {drafter}, {method} verification".format_map(speculation)
        _draw_acceptance(axes[0], speculation)
        _draw_tokens(axes[1], speculation)
    else:
        parts = {part: ms for part, ms in figures["step_ms"].items() if part != "total"}
        colors = dict(zip(parts, PARTS, strict=False))
        _draw_parts(axes[0], parts, colors)
        _draw_steps(axes[1], steps, colors)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _draw_acceptance(ax: Any, speculation: Mapping[str, Any]) -> None:
    """Of the drafts at each place in a block, how many were accepted."""
    drafted, accepted = (speculation[f"{x}_per_position"] for x in ("drafted", "accepted"))
    places = range(1, 1 + len(drafted))
    shares = speculation["acceptance_per_position"]
    ax.bar(places, [1] * len(places), color=LEFT, label="refused, or after one that was")
    ax.bar(places, shares, color=TAKEN, label="accepted")
    for place, share, part, whole in zip(places, shares, accepted, drafted, strict=True):
        inside = share > 0.85
        ax.annotate(
            f"{share:.0%}\n{part} of {whole}",
            (place, share),
            xytext=(0, -4 if inside else 4),
            textcoords="offset points",
            ha="center",
            va="top" if inside else "bottom",
            color="white" if inside else "black",
            fontsize=9,
        )
    if not drafted:
        ax.text(0.5, 0.5, "no drafts", transform=ax.transAxes, ha="center")
    ax.set(
        title=f"Accepted by position (length {speculation['acceptance_length']:.2f})",
        xlabel="position of a draft in its block",
        ylabel="share of drafts",
        xticks=places,
        ylim=(0, 1),
    )
    ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    if drafted:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False)


def _draw_tokens(ax: Any, speculation: Mapping[str, Any]) -> None:
    """How many steps of the target brought a prompt one token, two tokens, and so on."""
    counts, mean = speculation["steps_by_tokens"], speculation["tokens_per_target_step"]
    tokens = range(1, 1 + len(counts))
    bars = ax.bar(tokens, counts, color=TAKEN)
    ax.bar_label(bars, padding=2, fontsize=9)
    ax.axvline(mean, color=PARTS[1], linewidth=2, label=f"mean {mean:.2f}")
    ax.set(
        title="Tokens per target step",
        xlabel="new tokens of a prompt in one step",
        ylabel="steps of a prompt",
        xticks=tokens,
    )
    ax.margins(y=0.12)
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False)


def _draw_parts(ax: Any, parts: Mapping[str, float], colors: Mapping[str, str]) -> None:
    """The median time of each part of a step."""
    total = sum(parts.values())
    bars = ax.barh(list(parts), list(parts.values()), color=[colors[part] for part in parts])
    labels = [f"{ms:.1f} ms, {ms / total:.0%}" for ms in parts.values()]
    ax.bar_label(bars, labels, padding=4, fontsize=9)
    ax.invert_yaxis()
    ax.margins(x=0.35)
    ax.set(title="Parts of a step (medians)", xlabel="ms")


def _draw_steps(ax: Any, steps: Sequence[Mapping[str, float]], colors: Mapping[str, str]) -> None:
    """The time of every step, part upon part."""
    numbers, bottom = range(1, 1 + len(steps)), [0.0] * len(steps)
    for part, color in colors.items():
        times = [step[part] for step in steps]
        ax.bar(numbers, times, bottom=bottom, color=color, width=1, label=part)
        bottom = [low + ms for low, ms in zip(bottom, times, strict=True)]
    ax.set(title="All steps", xlabel="step", ylabel="ms")
    ax.margins(x=0.01)
    ax.xaxis.get_major_locator().set_params(integer=True)

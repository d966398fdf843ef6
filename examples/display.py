"""What a person sees: texts as they grow, then a table of figures."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

COLOURS = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))
"""Of tokens that were at least so likely."""


def colour(logprob: float | None) -> str:
    """The style of a token's text; none of a token of which nothing is told."""
    if logprob is None:
        return ""
    return next(style for least, style in COLOURS if math.exp(logprob) >= least)


class Display:
    """Shows nothing: what ranks other than the first have."""

    def begin(self, index: int, prompt: str) -> None:
        """Prompt `index` got a slot."""

    def write(self, index: int, piece: str, logprob: float | None = None) -> None:
        """Its text grew by `piece`, by a token whose log-probability is told or not."""

    def end(self, index: int) -> None:
        """Its text is complete."""


class LiveDisplay(Display):
    """All texts at once, growing in place on a terminal."""

    def __init__(self, separator: str) -> None:
        self._separator = separator
        self._texts: dict[int, Text] = {}

    def begin(self, index: int, prompt: str) -> None:
        self._texts[index] = Text().append(prompt, style="bold").append(self._separator)

    def write(self, index: int, piece: str, logprob: float | None = None) -> None:
        self._texts[index].append(piece, style=colour(logprob))

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for index, text in self._texts.items():
            table.add_row(Text(f"[{index}]", style="cyan"), text)
        return table


class LineDisplay(Display):
    """Lines of whole words, each with the number of its prompt: full, or what SECONDS brought."""

    WIDTH = 72
    SECONDS = 2.0

    def __init__(self, separator: str, console: Console) -> None:
        self._separator, self._console = separator, console
        self._pending: dict[int, str] = {}
        self._printed: dict[int, float] = {}

    def begin(self, index: int, prompt: str) -> None:
        self._pending[index], self._printed[index] = "", monotonic()
        self.write(index, prompt + self._separator)

    def write(self, index: int, piece: str, logprob: float | None = None) -> None:
        *lines, text = (self._pending[index] + piece).split("\n")
        late = monotonic() - self._printed[index] > self.SECONDS
        # The last word stays: it may still grow.
        while (late or len(text) > self.WIDTH) and (cut := text.rfind(" ", 1, self.WIDTH + 1)) > 0:
            lines.append(text[:cut])
            text = text[cut + 1 :]
        self._print(index, lines)
        self._pending[index] = text

    def end(self, index: int) -> None:
        self._print(index, [self._pending.pop(index)])

    def _print(self, index: int, lines: list[str]) -> None:
        for line in filter(str.strip, lines):
            self._console.print(f"[{index}] {line}", markup=False, highlight=False, soft_wrap=True)
            self._printed[index] = monotonic()


@contextmanager
def open_display(separator: str, *, quiet: bool, stderr: bool) -> Iterator[Display]:
    """A display that suits where the output goes; `separator` stands between prompt and text."""
    console = Console(stderr=stderr)
    if quiet:
        yield Display()
    elif console.is_terminal:
        texts = LiveDisplay(separator)
        with Live(texts, console=console, refresh_per_second=10):
            yield texts
    else:
        yield LineDisplay(separator, console)


def print_summary(figures: Mapping[str, Any], *, stderr: bool) -> None:
    """Print the figures of a run as a table."""
    step = figures["step_ms"]
    rows = {
        "generated": "{tokens} tokens in {seconds:.2f} s, {steps} steps",
        **(_speculation_rows(figures["speculation"]) if "speculation" in figures else {}),
        "tokens/s": "{tokens_per_second:.1f}",
        "first token": "after {first_token_seconds:.2f} s, and {load_seconds:.1f} s of loading",
        "step": "{step_ms[total]:.1f} ms (median)",
        **{f"  {part}": f"{ms:.1f} ms" for part, ms in step.items() if part != "total"},
        "sampling sent": "{wire_bytes:,} bytes a rank and step, at most",
        "logits received": "{logits_bytes:,} bytes a rank and step, at most",
        "  if replicated": "{replicated_logits_bytes:,} bytes a rank and step, at most",
    }
    if "perplexity" in figures:
        rows["perplexity"] = "{perplexity:.2f}"
    if "plot" in figures:
        rows["plot"] = "{plot}"
    if figures["compared"]:
        rows["compared"] = "the same tokens under every exchange, at every step"
    title = "{model} on {ranks} x {device}, {dtype}, exchange {exchange}"
    table = Table(title=title.format_map(figures), title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value.format_map(figures))
    Console(stderr=stderr).print(table)


def _speculation_rows(speculation: Mapping[str, Any]) -> dict[str, str]:
    """What drafts brought, as rows of the table."""
    rows = {
        "tokens/step": "{tokens_per_target_step:.2f} of a prompt",
        "acceptance length": "{acceptance_length:.2f} tokens of a step with drafts",
        "drafted": "{drafted_tokens} tokens by {drafter}, at most {num_speculative_tokens} a step",
        "accepted": "{accepted_tokens} tokens by {method} verification",
    }
    shares = " ".join(f"{share:.0%}" for share in speculation["acceptance_per_position"])
    return {name: text.format_map(speculation) for name, text in rows.items()} | {
        "  by position": (shares or "none").replace("%", " %"),
    }

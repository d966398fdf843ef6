"""What a person sees: texts as they grow, then a table of figures."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text


class Display:
    """Shows nothing: what ranks other than the first have."""

    def begin(self, index: int, prompt: str) -> None:
        """Prompt `index` got a slot."""

    def write(self, index: int, piece: str) -> None:
        """Its text grew by `piece`."""

    def end(self, index: int) -> None:
        """Its text is complete."""


class LiveDisplay(Display):
    """All texts at once, growing in place on a terminal."""

    def __init__(self) -> None:
        self._texts: dict[int, Text] = {}

    def begin(self, index: int, prompt: str) -> None:
        self._texts[index] = Text(prompt, style="bold")

    def write(self, index: int, piece: str) -> None:
        self._texts[index].append(piece, style="not bold")

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for index, text in self._texts.items():
            table.add_row(Text(f"[{index}]", style="cyan"), text)
        return table


class LineDisplay(Display):
    """Lines as they become complete, each with the number of its prompt."""

    WIDTH = 72

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending: dict[int, str] = {}

    def begin(self, index: int, prompt: str) -> None:
        self._pending[index] = prompt

    def write(self, index: int, piece: str) -> None:
        *lines, text = (self._pending[index] + piece).split("\n")
        # The last word stays: it may still grow.
        while len(text) > self.WIDTH and (cut := text.rfind(" ", 1, self.WIDTH + 1)) > 0:
            lines.append(text[:cut])
            text = text[cut + 1 :]
        self._print(index, lines)
        self._pending[index] = text

    def end(self, index: int) -> None:
        self._print(index, [self._pending.pop(index)])

    def _print(self, index: int, lines: list[str]) -> None:
        for line in filter(str.strip, lines):
            self._console.print(f"[{index}] {line}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def open_display(*, quiet: bool, stderr: bool) -> Iterator[Display]:
    """A display that suits where the output goes."""
    console = Console(stderr=stderr)
    if quiet:
        yield Display()
    elif console.is_terminal:
        texts = LiveDisplay()
        with Live(texts, console=console, refresh_per_second=10):
            yield texts
    else:
        yield LineDisplay(console)


def print_summary(figures: Mapping[str, Any], *, stderr: bool) -> None:
    """Print the figures of a run as a table."""
    step = figures["step_ms"]
    rows = {
        "generated": "{tokens} tokens in {seconds:.2f} s, {steps} steps",
        "tokens/s": "{tokens_per_second:.1f}",
        "first token": "after {first_token_seconds:.2f} s, and {load_seconds:.1f} s of loading",
        "step": "{step_ms[total]:.1f} ms (median)",
        **{f"  {part}": f"{ms:.1f} ms" for part, ms in step.items() if part != "total"},
        "sampling sent": "{wire_bytes:,} bytes a rank",
        "logits received": "{logits_bytes:,} bytes a rank at most",
        "  if replicated": "{replicated_logits_bytes:,} bytes",
    }
    title = "{model} on {ranks} x {device}, {dtype}, exchange {exchange}"
    table = Table(title=title.format_map(figures), title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value.format_map(figures))
    Console(stderr=stderr).print(table)

"""What a step would cost under each exchange, and which one "auto" takes, without running it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dtensor_sample.choose import fastest
from dtensor_sample.cost import COLLECTIVES, within
from dtensor_sample.exchange import EXCHANGES
from dtensor_sample.predict import hardware
from dtensor_sample.workload import Workload

SUFFIXES = (".png", ".pdf", ".svg")
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One exchange. Bytes, memory and time are those of a rank: of the fullest."""

    exchange: str
    """Its name."""
    owners: str
    """Who samples what."""
    num_rows: int
    """Rows of logits, padding included."""
    wire_bytes: int
    """Sent."""
    buffer_bytes: int
    """Logits received."""
    scratch_bytes: int
    """All else that the step allocates, about."""
    logits_bytes: int
    """The logits shard that the step is handed, padding included."""
    hidden_bytes: int
    """The selected hidden rows."""
    cache_bytes: int
    """Kept draft logits."""
    peak_bytes: int
    """The sum of the last five."""
    collectives: tuple[str, ...]
    """In order."""
    us: float
    """Predicted microseconds of device time."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A step under every exchange."""

    workload: Workload
    """What it is about."""
    machine: str
    """Whose constants predict time."""
    slots: int
    """Requests whose draft logits are kept."""
    estimates: tuple[Estimate, ...]
    """One for each of EXCHANGES."""
    choice: str
    """What "auto" takes."""
    taken: str | None = None
    """What a plan has taken."""
    details: Mapping[str, str] = field(default_factory=dict)
    """What else a plan says, by name."""

    @property
    def notes(self) -> list[str]:
        """What predictions stand on."""
        machine, P = hardware(self.machine), self.workload.ranks
        of = "" if self.machine == "cpu" else " of the device, as in a CUDA graph,"
        notes = [f"time:{of} by constants of {machine.about}"]
        if P > 2:
            notes.append(
                f"assumed: {machine.hop_us:g} us more of a collective for each doubling of ranks"
            )
        if machine.node_ranks < P:
            notes.append(
                f"assumed: nodes of {machine.node_ranks} ranks, "
                f"{machine.node_bytes_per_us / 1e3:g} GB/s of each rank to others"
            )
        return notes

    def as_json(self) -> dict[str, Any]:
        """The same figures for machines to read."""
        step = self.workload
        return {
            "ranks": step.ranks,
            "rows": step.rows,
            "requests": len(step.rows_B),
            "vocab": step.vocab_size,
            "dtype": str(step.dtype).removeprefix("torch."),
            "k": step.K,
            "method": step.method,
            "filters": {"top_k": step.filters.top_k, "top_p": step.filters.top_p},
            "slots": self.slots,
            "hardware": self.machine,
            "notes": self.notes,
            "choice": self.choice,
            **({} if self.taken is None else {"taken": self.taken}),
            "exchanges": {each.exchange: asdict(each) for each in self.estimates},
        }

    @property
    def title(self) -> str:
        """The step in a line."""
        step, rows = self.workload, self.workload.rows
        filters = ["top-k"] * step.filters.top_k + ["top-p"] * step.filters.top_p
        how = "greedy" if not step.filters.drawn else " and ".join(filters) or "no filter"
        return (
            f"{rows} rows of {len(step.rows_B)} requests x {step.vocab_size} ids, "
            f"{str(step.dtype).removeprefix('torch.')}, {how}, {step.ranks} ranks"
        )

    def cells(self) -> list[list[str]]:
        """The table, a line a property; first their names, then one cell for each exchange."""
        return [
            ["exchange", *(each.exchange for each in self.estimates)],
            ["rows sampled", *(each.owners for each in self.estimates)],
            ["sends", *(size(each.wire_bytes) for each in self.estimates)],
            ["receives logits", *(size(each.buffer_bytes) for each in self.estimates)],
            ["peak memory", *(size(each.peak_bytes) for each in self.estimates)],
            ["collectives", *(str(len(each.collectives)) for each in self.estimates)],
            *(
                [f"  {kind}", *(str(each.collectives.count(kind)) for each in self.estimates)]
                for kind in COLLECTIVES
            ),
            ["predicted time", *(f"{each.us:.0f} us" for each in self.estimates)],
            ["choice", *(self._marks(each.exchange) for each in self.estimates)],
        ]

    def _marks(self, exchange: str) -> str:
        marks = {"auto": self.choice, "taken": self.taken}
        return ", ".join(word for word, name in marks.items() if name == exchange)

    def __str__(self) -> str:
        """The table in plain text, and what it stands on."""
        table = self.cells()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        details = [f"{name}: {text}" for name, text in self.details.items()]
        return "\n".join([self.title, *lines, *details, *self.notes])


def explain(
    step: Workload,
    machine: str,
    *,
    slots: int = 0,
    hidden: int = 0,
    taken: str | None = None,
    bound: str | None = None,
    among: Sequence[str] = EXCHANGES,
    details: Mapping[str, str] | None = None,
) -> Explanation:
    """Count and predict a step under every exchange.

    Args:
        step: what it is about.
        machine: whose constants predict time: a name or a file, see `predict.hardware`.
        slots: requests whose draft logits are kept, if `step` has any.
        hidden: width of the hidden rows that `ShardPlan.select` copies.
        taken: the exchange of a plan that was made already.
        bound: what "auto" has to take, if it is not free.
        among: what it may take if it is.
        details: what else to say about it.
    """
    known = hardware(machine)
    estimates = []
    for name in EXCHANGES:
        cost, num_rows = step.cost(name), step.shape(name).num_rows
        parts = {
            "buffer_bytes": cost.buffer_bytes,
            "scratch_bytes": cost.scratch_bytes,
            "logits_bytes": step.logits_bytes(name),
            "hidden_bytes": num_rows * hidden * step.dtype.itemsize,
            "cache_bytes": step.cache_bytes(name, slots),
        }
        estimates.append(
            Estimate(
                exchange=name,
                owners=_owners(step, name),
                num_rows=num_rows,
                wire_bytes=cost.wire_bytes,
                peak_bytes=sum(parts.values()),
                collectives=cost.collectives,
                us=known.us(cost, step.ranks),
                **parts,
            )
        )
    return Explanation(
        workload=step,
        machine=machine,
        slots=slots,
        estimates=tuple(estimates),
        choice=bound or choice_of(step, machine, among),
        taken=taken,
        details=details or {},
    )


def choice_of(step: Workload, machine: str, among: Sequence[str] = EXCHANGES) -> str:
    """What "auto" takes for a step."""
    if step.capacity is not None and not step.graphed:
        return "batch"
    return fastest(
        machine,
        step.shape("batch"),
        step.shape("replicate"),
        step.vocab_size,
        step.filters,
        step.dtype,
        K=step.K,
        draft_dtype=step.draft_dtype,
        method=step.method,
        among=among,
    )


def _owners(step: Workload, name: str) -> str:
    if name == "vocab":
        return "all, own columns"
    if name == "replicate":
        return "all, by each rank"
    requests, drafts = Counter(step.owners_B), Counter[int]()
    for owner, count in zip(step.owners_B, step.rows_B, strict=True):
        drafts[owner] += count - 1
    rows = [requests[rank] + within(step.budget, drafts[rank]) for rank in range(step.ranks)]
    most, least = max(rows), min(rows)
    return f"{most} by each owner" if most == least else f"{least} to {most} by owners"


def size(amount: int) -> str:
    """Bytes for people to read."""
    value = float(amount)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def check_plot(path: Path) -> None:
    """Raise ValueError unless a figure can be written there."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--plot must end in {', '.join(SUFFIXES)}, got {path}")
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"--plot must be a file in a folder that exists, got {path}")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")


COLORS = {"batch": "#2a6f97", "vocab": "#e07a3f", "replicate": "#6a994e"}
PARTS = {
    "logits_bytes": ("logits shard", "#8aa5b5"),
    "buffer_bytes": ("received logits", "#2a6f97"),
    "scratch_bytes": ("scratch", "#c2a83e"),
    "hidden_bytes": ("hidden rows", "#6a994e"),
    "cache_bytes": ("draft logits", "#bc4b6b"),
}
"""Of peak memory."""


def draw(explanation: Explanation, path: Path) -> None:
    """Write a figure of predicted time, bytes sent and peak memory, which `check_plot` accepts."""
    from matplotlib.figure import Figure

    estimates = explanation.estimates
    names = [each.exchange for each in estimates]
    figure = Figure(figsize=(12, 3.8), dpi=150, layout="constrained")
    time, wire, memory = figure.subplots(1, 3)
    for ax in (time, wire, memory):
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(y=0.15)
    colors = [COLORS[name] for name in names]
    bars = time.bar(names, [each.us for each in estimates], color=colors)
    time.bar_label(
        bars,
        [
            f"{each.us:.0f} us" + ("\nauto" if each.exchange == explanation.choice else "")
            for each in estimates
        ],
        padding=2,
    )
    time.set(title="predicted time of the device", ylabel="us")
    bars = wire.bar(names, [each.wire_bytes / MIB for each in estimates], color=colors)
    wire.bar_label(
        bars,
        [f"{size(each.wire_bytes)}\n{len(each.collectives)} collectives" for each in estimates],
        padding=2,
    )
    wire.set(title="sent by a rank", ylabel="MiB")
    bottom = [0.0] * len(names)
    for part, (label, color) in PARTS.items():
        heights = [getattr(each, part) / MIB for each in estimates]
        if any(heights):
            bars = memory.bar(names, heights, bottom=bottom, color=color, label=label)
            bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    memory.bar_label(bars, [size(each.peak_bytes) for each in estimates], padding=2)
    memory.set(title="peak memory of a rank", ylabel="MiB")
    memory.legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(explanation.title, fontsize=11)
    figure.savefig(path)

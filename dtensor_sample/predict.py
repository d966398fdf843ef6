"""From what a step does to microseconds, by measured constants of a machine.

Every operation takes a fixed time and a time that grows with its amount; a step takes their sum:
kernels and collectives of one step wait for each other. That is device time, as in a replayed CUDA
graph: an eager step is bound by the host instead, whichever exchange it takes. `fit` finds the
constants from measured steps by least squares of relative errors, none negative; the table of those
that the library knows is `hardware.json`, which `docs/fit_cost.py` writes.

What was measured has few ranks. Beyond them, these assumptions hold:

- ranks of one node exchange bytes as fast as the measured ones do, each over links of its own;
- a collective's fixed time grows by `hop_us` with every doubling of ranks beyond two;
- ranks beyond `node_ranks` are on other nodes: what has to cross takes each rank's share of
  `node_bytes_per_us`, at the same time as what does not;
- kernels take as long on every rank, and their time depends on the logits that they read alone.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtensor_sample import check
from dtensor_sample.cost import COLLECTIVES, KERNELS, Cost, Op

TABLE = Path(__file__).with_name("hardware.json")
CONSTANTS = (
    "collective_us",
    "all_to_all_us_per_mb",
    "gather_us_per_mb",
    *(f"{kernel}_{unit}" for kernel in KERNELS for unit in ("us", "us_per_million")),
)
"""What is fitted: microseconds of each operation, and of a megabyte sent or a million logits read.
All-gathers and all-reduces share a speed, and all collectives a fixed time."""


@dataclass(frozen=True)
class Hardware:
    """Constants of one kind of machine."""

    name: str
    """As in the table, or the path of a file."""
    about: str
    """What was measured, when and where."""
    constants: Mapping[str, float]
    """One for each of CONSTANTS."""
    hop_us: float
    """Assumed, not measured: see the module."""
    node_ranks: int
    """Ranks of a node."""
    node_bytes_per_us: float
    """Of a rank, to other nodes; assumed, not measured."""

    def us(self, cost: Cost, ranks: int) -> float:
        """Microseconds of device time that a step takes on each of `ranks` ranks."""
        per_op = self.constants
        total = 0.0
        for number, name in zip(features(cost), CONSTANTS, strict=True):
            total += number * per_op[name]
        if ranks > 2:
            total += len(cost.collectives) * self.hop_us * math.log2(ranks / 2)
        if ranks > self.node_ranks:
            total += sum(self._crossing_us(op, ranks) for op in cost.ops)
        return total

    def _crossing_us(self, op: Op, ranks: int) -> float:
        """What a collective takes longer for ranks of other nodes."""
        if op.kind not in COLLECTIVES:
            return 0.0
        elsewhere = (ranks - self.node_ranks) / (ranks - 1)
        if op.kind != "all_to_all":  # one copy crosses for all ranks of a node
            elsewhere /= self.node_ranks
        inside = self.constants[_speed(op.kind)] * op.amount / 1e6
        return max(0.0, op.amount * elsewhere / self.node_bytes_per_us - inside)


def _speed(kind: str) -> str:
    return "all_to_all_us_per_mb" if kind == "all_to_all" else "gather_us_per_mb"


def features(cost: Cost) -> list[float]:
    """How often each of CONSTANTS counts in a step."""
    numbers = dict.fromkeys(CONSTANTS, 0.0)
    for kind, amount in cost.ops:
        if kind in COLLECTIVES:
            numbers["collective_us"] += 1
            numbers[_speed(kind)] += amount / 1e6
        else:
            numbers[f"{kind}_us"] += 1
            numbers[f"{kind}_us_per_million"] += amount / 1e6
    return list(numbers.values())


def fit(
    costs: Sequence[Cost], us: Sequence[float], known: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The constants that make relative errors least squares.

    Args:
        costs: of measured steps on at most two ranks, or as many as `Hardware.hop_us` knows about.
        us: what each took.
        known: constants to keep where no step says anything.
    """
    x_NM = np.array([features(cost) for cost in costs])
    seen_M = x_NM.any(0)
    found = _nonnegative(x_NM[:, seen_M] / np.array(us)[:, None], np.ones(len(us)))
    fitted = dict(zip(np.array(CONSTANTS)[seen_M].tolist(), found.tolist(), strict=True))
    return {name: fitted.get(name, (known or {}).get(name, 0.0)) for name in CONSTANTS}


def _nonnegative(a_NM: np.ndarray, b_N: np.ndarray) -> np.ndarray:
    """[M] the x >= 0 with the least |a x - b|: passive sets (Lawson and Hanson, 1974, ch. 23)."""
    x_M = np.zeros(a_NM.shape[1])
    passive_M = np.zeros(len(x_M), dtype=bool)
    for _ in range(10 * len(x_M)):
        gain_M = np.where(passive_M, -np.inf, a_NM.T @ (b_N - a_NM @ x_M))
        if gain_M.max(initial=-np.inf) <= 1e-9:
            break
        passive_M[gain_M.argmax()] = True
        while True:
            best_M = np.zeros_like(x_M)
            best_M[passive_M] = np.linalg.lstsq(a_NM[:, passive_M], b_N, rcond=None)[0]
            negative_M = passive_M & (best_M <= 0)
            if not negative_M.any():
                break
            # As far towards the best as all stay positive; those that reach zero leave the set.
            step = (x_M[negative_M] / (x_M[negative_M] - best_M[negative_M])).min()
            x_M = x_M + step * (best_M - x_M)
            passive_M &= x_M > 1e-12
            x_M[~passive_M] = 0
        x_M = best_M
    return x_M


@functools.lru_cache(maxsize=16)
def hardware(name: str) -> Hardware:
    """Constants by name, or from a JSON file that was calibrated; ValueError if there are none."""
    path = Path(name)
    table = _read(TABLE)
    if name in table:
        return _of(name, table[name])
    if path.suffix != ".json" or not path.is_file():
        raise ValueError(
            f"gpu must be one of {tuple(table)} or a JSON file that --calibrate wrote, got {name!r}"
        )
    try:
        ((_, entry),) = _read(path).items()
        return _of(name, entry)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"gpu must be a file that --calibrate wrote, got {name!r}: {error}"
        ) from None


def constants_of(name: str) -> tuple[float, ...]:
    """What predictions depend on, for ranks to compare: two files may hold the same."""
    found = hardware(name)
    assumed = (found.hop_us, found.node_ranks, found.node_bytes_per_us)
    return (*found.constants.values(), *assumed)


def names() -> list[str]:
    """The machines of the table."""
    return list(_read(TABLE))


def _read(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text())
    return table


def _of(name: str, entry: Mapping[str, Any]) -> Hardware:
    found = {key: check.real(key, entry["constants"][key]) for key in CONSTANTS}
    return Hardware(
        name=name,
        about=str(entry["about"]),
        constants=found,
        hop_us=check.real("hop_us", entry["hop_us"]),
        node_ranks=check.integer("node_ranks", entry["node_ranks"], 1),
        node_bytes_per_us=check.real("node_bytes_per_us", entry["node_bytes_per_us"]),
    )


def write(path: Path, machines: Sequence[Hardware]) -> None:
    """Write a table that `hardware` reads."""
    table = {machine.name: asdict(machine) for machine in machines}
    for entry in table.values():
        del entry["name"]
        entry["constants"] = {key: round(x, 4) for key, x in entry["constants"].items()}
    path.write_text(json.dumps(table, indent=2) + "\n")

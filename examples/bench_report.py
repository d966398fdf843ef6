"""What the benchmarks share: joining the ranks, and writing down what was measured, and on what."""

import csv
import datetime as dt
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Record = Mapping[str, Any]
"""One measured case: the fields of the CSV."""


def join() -> DeviceMesh:
    """The mesh of all ranks that torchrun started, or of this process alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))


def slowest(values: Sequence[float], device: str) -> list[float]:
    """The largest of any rank, one by one."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]


def about(mesh: DeviceMesh, script: str, **facts: object) -> dict[str, object]:
    """What figures mean nothing without."""
    cuda = mesh.device_type == "cuda"
    machine = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    return {
        "date": dt.date.today().isoformat(),
        "machine": f"{mesh.size()} x {machine}",
        "torch": torch.__version__,
        "commit": commit or "unknown",
        "command": " ".join([f"examples/{script}", *sys.argv[1:]]),
        **facts,
    }


def markdown(
    title: str,
    facts: Mapping[str, object],
    columns: Mapping[str, str],
    records: Sequence[Record],
    *remarks: str,
) -> str:
    """A report: how the figures came about, the table of them, and what they say."""
    lines = [f"# {title}", "", *(f"- {name}: {value}" for name, value in facts.items())]
    lines += ["", "| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for record in records:
        cells = ("" if record[key] is None else str(record[key]) for key in columns)
        lines.append("| " + " | ".join(cells) + " |")
    for remark in remarks:
        lines += ["", remark]
    return "\n".join(lines) + "\n"


def write(name: Path, columns: Mapping[str, str], records: Sequence[Record], text: str) -> None:
    """NAME.csv and NAME.md."""
    with name.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(records)
    name.with_suffix(".md").write_text(text)


def show(record: Record) -> None:
    """A line for a record, while others are being measured."""
    if dist.get_rank() == 0:
        print(*(f"{key}={value}" for key, value in record.items()), flush=True)

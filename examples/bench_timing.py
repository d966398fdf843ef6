"""How the benchmarks time a step: all ways in turns, on a GPU as CUDA graphs, the slowest rank."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from bench_report import percentile, slowest
from bench_ways import Way
from torch import Tensor

from dtensor_sample.calibrate import timer


def timings(
    ways: Mapping[str, Way], rounds: int, device: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way's name and what it takes: the fields us, us_20, us_80, us_99, host_us, extra_mib."""
    host = {name: host_us(way.step, device) for name, way in ways.items()}
    extra = {name: extra_mib(way, device) for name, way in ways.items()}
    timers = {name: timer(way.step, device) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in timers.items():
            times[name] += slowest([run()], device)
    timers.clear()  # graphs hold collectives: they must go before the group does
    for name, us in times.items():
        yield name, {**spread(us), "host_us": host[name], "extra_mib": extra[name]}


def host_us(step: Callable[[], Tensor], device: str) -> int | None:
    """Microseconds until a step has been asked for, of the slowest rank, not waiting for a GPU."""
    if device == "cpu":
        return None  # where nothing else is timed
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()
    return round(slowest([statistics.median(times)], device)[0])


def extra_mib(way: Way, device: str) -> float | None:
    """Memory that a way takes beyond the logits that it was given, at most."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way.step()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before + way.kept_bytes) / 2**20, 1)


def spread(us: Sequence[float]) -> dict[str, float | None]:
    """Median and percentiles; the 99th, if there are enough of them."""
    tenths = statistics.quantiles(us, n=10, method="inclusive")
    last = round(percentile(us, 99), 1) if len(us) >= 100 else None
    return {
        "us": round(tenths[4], 1),
        "us_20": round(tenths[1], 1),
        "us_80": round(tenths[7], 1),
        "us_99": last,
    }

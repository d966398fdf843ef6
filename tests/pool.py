"""Many-rank tests without the cost of starting ranks.

A pool is a set of worker processes, one a rank, that live as long as the test session. Each has
joined one process group and built the mesh `("tp",)`; then it waits on a pipe for jobs. A job is
a top-level function `body(mesh, *args, **kwargs)` that every rank calls; the list of what the
ranks returned comes back to the test. Starting processes costs seconds a test, a job costs
milliseconds.

    def total(mesh, start):
        x = torch.tensor([start + mesh.get_local_rank()], device=mesh.device_type)
        dist.all_reduce(x, group=mesh.get_group())
        return x

    @worlds("cpu:4", "cuda:2")  # without this line: every world of WORLDS
    def test_total(ranks):
        for result in ranks.run(total, 1):
            assert result.item() == sum(range(1, ranks.size + 1))

Workers are forked from a server process that has imported torch once. A pool that a job has
failed in is killed, since nobody knows which collectives its ranks still wait in; the next job
gets a new one.
"""

import contextlib
import faulthandler
import gc
import importlib
import io
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WORLDS = ("cpu:1", "cpu:2", "cpu:4", "cuda:1", "cuda:2")
# One rank, and several: for what has no more cases than these two.
FEW_WORLDS = ("cpu:1", "cpu:4", "cuda:1", "cuda:2")
# Worlds beside these two, for who has more devices or time: "cuda:4 cuda:8".
MORE_WORLDS = tuple(os.environ.get("DTENSOR_SAMPLE_TEST_WORLDS", "").split())
# On a GPU the first job of a kind compiles its kernels: 60 s were seen, beside other tests.
JOB_TIMEOUT_S = {"cpu": 60.0, "cuda": 100.0}
START_TIMEOUT_S = 100.0
GROUP_TIMEOUT = timedelta(seconds=30)
# After one rank failed, how long the others may take to fail by themselves and be reported too.
GRACE_S = 0.5
# Asks a rank to print where it is. Triton's LLVM takes SIGUSR1 and SIGUSR2 for itself.
STACKS = getattr(signal, "SIGRTMIN", signal.SIGUSR1)
# How long destroy_process_group may take when the session ends.
CLOSE_TIMEOUT_S = 5.0

# Imported once, by the server that workers are forked from; unknown names are skipped by it.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "hypothesis",
    "numpy",
    "pytest",
    "scipy.stats",
    "dtensor_sample",
]

# Workers compile in their own process: a compile server for each rank would outnumber the cores.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# An import that asks whether CUDA is there must not initialize it: that does not survive a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


class WorkerError(AssertionError):
    """One or more ranks failed, died, or did not finish in time. The text has their tracebacks."""


class World(NamedTuple):
    """A device type and the number of ranks: `"cpu:4"`."""

    device_type: str
    size: int

    @classmethod
    def parse(cls, spec: str) -> "World":
        device_type, size = spec.split(":")
        return cls(device_type, int(size))

    def __str__(self) -> str:
        return f"{self.device_type}:{self.size}"


def world_params(*specs: str) -> list[Any]:
    """`"cpu:4"`, ... as pytest params; those on CUDA devices are marked `gpu`.

    Of several worlds of CPUs the largest finds most; the others are left to the slow suite.
    """
    if specs in (WORLDS, FEW_WORLDS):
        specs += MORE_WORLDS
    largest = max((World.parse(s).size for s in specs if s.startswith("cpu")), default=0)
    params = []
    for spec in specs:
        smaller = spec.startswith("cpu") and World.parse(spec).size < largest
        marks = {"gpu": spec.startswith("cuda"), "slow": smaller}
        names = [name for name, marked in marks.items() if marked]
        params.append(pytest.param(spec, id=spec, marks=[getattr(pytest.mark, n) for n in names]))
    return params


def worlds(*specs: str) -> pytest.MarkDecorator:
    """Decorate a test with the worlds that its fixture `ranks` shall have: `@worlds("cpu:4")`."""
    return pytest.mark.parametrize("ranks", world_params(*specs), indirect=True)


@dataclass(frozen=True)
class Ranks:
    """What the fixture `ranks` gives to a test: one world, and `run` to call a body on it."""

    pools: "Pools"
    world: World

    @property
    def device_type(self) -> str:
        return self.world.device_type

    @property
    def size(self) -> int:
        return self.world.size

    def run(
        self, body: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call `body(mesh, *args, **kwargs)` on every rank; return the results in rank order.

        Tensors travel both ways as contiguous CPU tensors. Every job starts from
        `torch.manual_seed(0)`. An error that is expected must be caught inside the body.

        Raises:
            WorkerError: A rank raised, died, or had not returned after `timeout` seconds, of
                JOB_TIMEOUT_S unless given.
        """
        __tracebackhide__ = True
        job = _dumps((body, args, kwargs))  # before a pool is touched: this may fail
        return self.pools.get(self.world).run(job, timeout or JOB_TIMEOUT_S[self.device_type])


def start_server() -> None:
    """Start the server that workers are forked from; it does its imports while others do theirs."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()


class Pools:
    """The pools of one session, started when first asked for."""

    def __init__(self, filters: Sequence[str] = ("error",)) -> None:
        """`filters` are warning filters as pytest's option `filterwarnings` has them."""
        self._filters = list(filters)
        self._pools: dict[World, Pool] = {}

    def get(self, world: World) -> "Pool":
        pool = self._pools.get(world)
        if pool is None or not pool.alive:
            pool = self._pools[world] = Pool(world, self._filters)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.ask_to_leave()
        for pool in self._pools.values():
            pool.close()


class Pool:
    """The worker processes of one world."""

    def __init__(self, world: World, filters: Sequence[str]) -> None:
        self.world = world
        self.alive = True
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._connections: list[connection.Connection] = []
        self._processes: list[Any] = []
        start_server()
        context = multiprocessing.get_context("forkserver")
        with self._killed_on_error():
            for rank in range(world.size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_worker,
                    args=(there, rank, world, self._folder, list(filters)),
                    name=f"rank {rank} of {world}",
                    daemon=True,
                )
                process.start()
                there.close()
                self._connections.append(here)
                self._processes.append(process)
            self._collect(START_TIMEOUT_S)

    def run(self, job: bytes, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        with self._killed_on_error():
            for worker in self._connections:
                with contextlib.suppress(OSError):  # a dead rank is reported by _collect
                    worker.send_bytes(job)
            return self._collect(timeout)

    def ask_to_leave(self) -> None:
        if self.alive:
            for worker in self._connections:
                with contextlib.suppress(OSError):
                    worker.send_bytes(b"")

    def close(self) -> None:
        """Wait until the workers have left their group, but not for long."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S + 1
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        self.alive = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5)
        for worker in self._connections:
            worker.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # a test's own timeout and Ctrl-C too: ranks are left in mid-job
            self.kill()
            raise

    def _collect(self, timeout: float) -> list[Any]:
        """One answer of each rank, or WorkerError."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._connections))
        while waiting:
            left = deadline - time.monotonic()
            ready = connection.wait(list(waiting.values()), max(0.0, left))
            if not ready and left <= 0:
                break
            for rank in [rank for rank, worker in waiting.items() if worker in ready]:
                try:
                    ok, value = pickle.loads(waiting.pop(rank).recv_bytes())
                except (EOFError, OSError):
                    ok, value = False, self._epitaph(rank)
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not failures and not waiting:
            return [results[rank] for rank in range(self.world.size)]
        if not failures:
            failures = self._stacks(waiting, timeout)
        raise WorkerError(_report(self.world, failures))

    def _epitaph(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(5)
        return f"the process died, exit code {process.exitcode}; it had printed:\n" + self._log(
            rank
        )

    def _stacks(self, ranks: Sequence[int] | dict[int, Any], timeout: float) -> dict[int, str]:
        """Where the ranks are that did not answer in time."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, STACKS)
        time.sleep(GRACE_S)
        return {
            rank: f"no answer after {timeout:g} s; it is at:\n" + self._log(rank) for rank in ranks
        }

    def _log(self, rank: int, last: int = 60) -> str:
        text = _log_file(self._folder, rank).read_text(errors="replace")
        return "\n".join(text.splitlines()[-last:]) or "(nothing)"


def _report(world: World, failures: dict[int, str]) -> str:
    """The failures, first come first, those with equal texts under one heading."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks_by_text.setdefault(text.rstrip(), []).append(rank)
    return "\n\n".join(
        f"rank {', '.join(map(str, sorted(ranks)))} of {world}: {text}"
        for text, ranks in ranks_by_text.items()
    )


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _worker(
    pipe: connection.Connection, rank: int, world: World, folder: Path, filters: list[str]
) -> None:
    """The life of one rank: join the group, do jobs until told to end, leave the group."""
    gc.freeze()  # what the server has imported is shared memory: collecting would copy it
    threading.Thread(target=_die_with_parent, daemon=True).start()
    log = os.open(_log_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(STACKS, sys.stderr)
    with contextlib.suppress(ImportError):
        # Its own lock is a semaphore, which a worker that is killed would leave behind.
        importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
    with warnings.catch_warnings():
        _apply_filters(filters)
        try:
            mesh = _join(rank, world, folder)
        except BaseException:
            pipe.send_bytes(_dumps((False, traceback.format_exc())))
            return
        pipe.send_bytes(_dumps((True, None)))
        with contextlib.suppress(EOFError):
            while job := pipe.recv_bytes():
                pipe.send_bytes(_answer(mesh, job))
        # A group may hang here, for one while CUDA graphs with its collectives still exist.
        guard = threading.Timer(CLOSE_TIMEOUT_S, os._exit, (1,))
        guard.daemon = True
        guard.start()
        gc.collect()
        dist.destroy_process_group()


def _join(rank: int, world: World, folder: Path) -> DeviceMesh:
    torch.set_num_threads(1)
    device = None
    if world.device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if world.device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world.size,
        timeout=GROUP_TIMEOUT,
        device_id=device,
    )
    return init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("tp",))


def _answer(mesh: DeviceMesh, job: bytes) -> bytes:
    try:
        body, args, kwargs = pickle.loads(job)
        torch.manual_seed(0)
        return _dumps((True, body(mesh, *args, **kwargs)))
    except BaseException:  # whatever it was, the test shall see it
        return _dumps((False, traceback.format_exc()))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _apply_filters(filters: Sequence[str]) -> None:
    """Set warning filters that are written as pytest's: `action:message:category:module:line`."""
    for text in filters:
        parts = [part.strip() for part in text.split(":")]
        action, message, category, module, line = parts + [""] * (5 - len(parts))
        kind: Any = Warning
        if category:
            package, _, name = category.rpartition(".")
            kind = getattr(importlib.import_module(package or "builtins"), name)
        set_filter: Any = warnings.filterwarnings  # wants a literal action
        set_filter(action, message, kind, module, int(line or 0))


class _Pickler(pickle.Pickler):
    """Tensors travel by value: no shared memory, no device, no autograd history."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"a {type(obj).__name__} cannot leave its process: send a plain tensor")
        flat = obj.detach().cpu().contiguous().reshape(-1)
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), flat.dtype, tuple(obj.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _dumps(obj: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getvalue()

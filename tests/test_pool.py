"""The pool of ranks itself: results, errors, dead and hanging ranks, speed."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from tests.pool import Ranks, WorkerError, worlds

ROOT = Path(__file__).parent.parent


def total(mesh, start):
    x = torch.tensor([start + mesh.get_local_rank()], device=mesh.device_type)
    dist.all_reduce(x, group=mesh.get_group())
    return x


def echo(mesh, *args, **kwargs):
    return args, kwargs


def pid(mesh):
    return os.getpid()


def random_number(mesh):
    return torch.rand(()).item()


def fail_on_one(mesh, bad_rank):
    if mesh.get_local_rank() == bad_rank:
        raise ZeroDivisionError("no such number")
    total(mesh, 0).item()


def fail_on_all(mesh):
    raise ZeroDivisionError("no such number")


def warn(mesh):
    warnings.warn("beware", stacklevel=1)


def hang_on_one(mesh, bad_rank):
    while mesh.get_local_rank() == bad_rank:
        time.sleep(0.01)
    total(mesh, 0).item()


def die_on_one(mesh, bad_rank):
    if mesh.get_local_rank() == bad_rank:
        os.write(2, b"last words\n")
        os._exit(7)
    total(mesh, 0).item()


def compiled(mesh, x):
    return torch.compile(lambda x: torch.sin(x) + 1, fullgraph=True)(x)


def return_dtensor(mesh):
    return DTensor.from_local(torch.zeros(1, device=mesh.device_type), mesh, [Shard(0)])


def test_a_collective_reaches_all_ranks(ranks: Ranks):
    results = ranks.run(total, 1)
    assert [x.item() for x in results] == [sum(range(1, ranks.size + 1))] * ranks.size
    assert all(x.device.type == "cpu" for x in results)


@worlds("cpu:1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (4, 0, 2)])
def test_tensors_come_back_bit_for_bit(ranks: Ranks, dtype, shape):
    tensor = (100 * torch.rand(shape)).to(dtype)
    [((back,), kwargs)] = ranks.run(echo, tensor, other={"strided": torch.arange(6).view(2, 3).T})
    torch.testing.assert_close(back, tensor, rtol=0, atol=0)
    assert kwargs["other"]["strided"].tolist() == [[0, 3], [1, 4], [2, 5]]


@worlds("cpu:2", "cuda:2")
def test_a_hundred_jobs_are_quick_and_share_the_processes(ranks: Ranks):
    before = ranks.run(pid)
    start = time.monotonic()
    for i in range(100):
        ranks.run(total, i)
    assert time.monotonic() - start < 5  # 0.1 s on an idle machine
    assert ranks.run(pid) == before


@worlds("cpu:2")
def test_every_job_starts_from_the_same_seed(ranks: Ranks):
    assert len({*ranks.run(random_number), *ranks.run(random_number)}) == 1


@worlds("cpu:4", "cuda:2")
def test_an_error_on_one_rank_is_reported_and_the_pool_recovers(ranks: Ranks):
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 of .*: Traceback") as caught:
        ranks.run(fail_on_one, 1)
    assert time.monotonic() - start < 10  # the others wait for it and are not waited for
    assert 'raise ZeroDivisionError("no such number")' in str(caught.value)
    test_a_collective_reaches_all_ranks(ranks)


@worlds("cpu:2")
def test_equal_errors_are_shown_once(ranks: Ranks):
    with pytest.raises(WorkerError, match="rank 0, 1 of cpu:2") as caught:
        ranks.run(fail_on_all)
    assert str(caught.value).count("Traceback") == 1


@worlds("cpu:1")
def test_warnings_are_errors_in_workers(ranks: Ranks):
    with pytest.raises(WorkerError, match="UserWarning: beware"):
        ranks.run(warn)


@pytest.mark.slow
@worlds("cpu:2")
def test_workers_can_compile(ranks: Ranks):
    x = torch.arange(8.0)
    for result in ranks.run(compiled, x):
        torch.testing.assert_close(result, torch.sin(x) + 1)


@worlds("cpu:1")
def test_a_result_that_cannot_travel_is_reported(ranks: Ranks):
    with pytest.raises(WorkerError, match="DTensor cannot leave its process"):
        ranks.run(return_dtensor)


@worlds("cpu:1")
def test_a_body_that_cannot_travel_is_refused(ranks: Ranks):
    before = ranks.run(pid)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        ranks.run(lambda mesh: None)
    assert ranks.run(pid) == before


@worlds("cpu:4", "cuda:2")
def test_a_rank_that_hangs_is_reported_with_its_place(ranks: Ranks):
    ranks.run(pid)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="no answer after 1 s") as caught:
        ranks.run(hang_on_one, 1, timeout=1)
    assert time.monotonic() - start < 10
    assert "in hang_on_one" in str(caught.value)
    test_a_collective_reaches_all_ranks(ranks)


@worlds("cpu:4", "cuda:2")
def test_a_rank_that_dies_is_reported_with_its_last_words(ranks: Ranks):
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 of .* exit code 7") as caught:
        ranks.run(die_on_one, 1)
    assert time.monotonic() - start < 10
    assert "last words" in str(caught.value)
    test_a_collective_reaches_all_ranks(ranks)


@pytest.mark.slow
def test_workers_die_with_the_session(tmp_path: Path):
    """A session that is killed takes its workers along, even those in the middle of a job."""
    script = """
        import os, threading
        from tests.pool import Pools, Ranks, World
        from tests.test_pool import hang_on_one, pid
        ranks = Ranks(Pools(), World("cpu", 2))
        print(*ranks.run(pid), flush=True)
        ranks.run(hang_on_one, 0)  # rank 1 waits in a collective
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    env = os.environ | {"TMPDIR": str(tmp_path)}  # a killed session leaves its files behind
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        pids = [int(word) for word in session.stdout.readline().split()]
        assert len(pids) == 2
        session.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [p for p in pids if is_running(p)]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"

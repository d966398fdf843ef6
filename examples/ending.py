"""How ranks end.

With gloo, torch runs collectives in threads that live until the process has ended. One of them may
still hold a finished collective, and with it a tensor that Python knew, when the interpreter ends;
freeing that tensor then takes the interpreter's lock, which ends the thread and thereby the process
("terminate called without an active exception", https://github.com/pytorch/pytorch/issues/190489).
On a machine with more processes than cores this comes up. So wait, while the lock can still be had,
until these threads rest.
"""

import contextlib
import time
from pathlib import Path

import torch.distributed as dist

LIMIT_S = 10.0


def end_ranks() -> None:
    """Leave the process group, once all ranks are here."""
    dist.barrier()
    dist.destroy_process_group()
    wait_for_rest()


def wait_for_rest() -> None:
    """Return when gloo's threads rest at two looks in a row, or after `LIMIT_S` seconds."""
    end, rested = time.monotonic() + LIMIT_S, 0
    while rested < 2 and time.monotonic() < end:
        time.sleep(0.01)  # without the interpreter's lock, for which a thread may wait
        rested = rested + 1 if threads_rest() else 0


def threads_rest() -> bool:
    """Whether no thread of gloo's collectives runs or waits for a core."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has just ended
            name, state = (task / "stat").read_text().split("(", 1)[1].rsplit(") ", 1)
            if name == "pt_gloo_runloop" and not state.startswith("S"):
                return False
    return True

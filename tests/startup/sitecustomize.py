"""Run at the start of each Python that a test starts with this folder on PYTHONPATH.

With gloo, torch runs collectives in threads that live until the process has ended. One of them may
still hold a finished collective, and with it a tensor that Python knew, when the interpreter ends;
freeing that tensor then takes the interpreter's lock, which ends the thread and thereby the process
("terminate called without an active exception", https://github.com/pytorch/pytorch/issues/190489).
On a machine with more processes than cores this comes up. So wait, while the lock can still be had,
until these threads rest.
"""

import atexit
import contextlib
import time
from pathlib import Path

LIMIT_S = 10.0


def threads_rest() -> bool:
    """Whether no thread of gloo's collectives runs or waits for a core."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has just ended
            name, state = (task / "stat").read_text().split("(", 1)[1].rsplit(") ", 1)
            if name == "pt_gloo_runloop" and not state.startswith("S"):
                return False
    return True


def wait_for_rest() -> None:
    """Return when threads rest at two looks in a row, or after `LIMIT_S` seconds."""
    end, rested = time.monotonic() + LIMIT_S, 0
    while rested < 2 and time.monotonic() < end:
        time.sleep(0.01)  # without the interpreter's lock, for which a thread may wait
        rested = rested + 1 if threads_rest() else 0


atexit.register(wait_for_rest)

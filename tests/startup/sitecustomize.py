"""Run at the start of each Python that a test starts with this folder, and examples, on PYTHONPATH.

Scripts that end as anyone's do are given what `examples/ending.py` tells of.
"""

import atexit
import sys


def rest() -> None:
    """As `ending` does, which imports torch: not to be done where nobody has."""
    if "torch" in sys.modules:
        from ending import wait_for_rest

        wait_for_rest()


atexit.register(rest)

"""Random state that a fork copies: without this all forked children would draw the same numbers.

Only what is loaded already is touched: a library that the child imports later seeds itself. (Python's own `random` is
seeded anew by the interpreter; it stands here so that one place says what is done.)
"""

from __future__ import annotations

import random
import sys
from typing import Any


def reseed() -> None:
    """Fresh seeds from the kernel for python, numpy and torch (CPU; a GPU's generator is made with its context)."""
    random.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        # Not torch.seed(): that queues a seeding for every kind of device, each with a traceback of where.
        torch.default_generator.seed()

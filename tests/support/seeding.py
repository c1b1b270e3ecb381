"""Seeds of random tests, which are printed: a failure can be had again."""

from __future__ import annotations

import random


def new_seed() -> int:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return seed

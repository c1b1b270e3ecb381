"""Jobs over the hostile driver and an engine that were built with a sanitizer: a program.

    LD_PRELOAD=(its runtime) python sanitized.py FLAGS JOBS STAGES CHUNKS ORDER

FLAGS: of the compiler, with blanks between. It ends with status 0 if nothing was found.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.hostile_cuda import build, driver, waits

from megatron_adaptra.adapter.baseline import cpu


def main() -> int:
    flags = sys.argv[1].split()
    jobs, stages, chunks, order = int(sys.argv[2]), *map(int, sys.argv[3:5]), sys.argv[5]
    cpu.install()
    library, engine = build.built(flags), build.built_engine(flags)
    driver.built = lambda: library
    waits.built_engine = lambda: engine
    driver.load(library)
    waits.Engine()
    gc.freeze()
    from hostile_cuda.jobs import Job
    from hostile_cuda.ranks import run

    for seed in range(jobs):
        job = Job(stages, chunks, order, (1, 8, 32)[seed % 3], seed)
        if faults := run(job, 120.0).faults:
            print(job, *faults, sep="\n")
            return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the interpreter's own end is not what is tested

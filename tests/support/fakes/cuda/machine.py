"""A machine with GPUs that there are not: runs a program over the fake CUDA and NCCL.

    python fakes/cuda/machine.py --queues 32 --kernel-us 20 --links FILE PROGRAM ARGUMENTS...

The program is the one that runs on a GPU, with torch's build for CUDA. See fakes/README.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fakes.cuda import building

# Option, variable of libraries/options.hpp, what it is.
OPTIONS = (
    ("queues", "QUEUES", "hardware queues of a device (default: CUDA_DEVICE_MAX_CONNECTIONS or 8)"),
    ("kernel-us", "KERNEL_US", "microseconds of each kernel (0)"),
    ("copy-gbps", "COPY_GBPS", "GB/s of copies between host and device, each way (20)"),
    ("devices", "DEVICES", "devices (8)"),
    ("depth", "DEPTH", "ops that a hardware queue takes before a launch blocks (1024)"),
    ("links", "LINKS", "file with slow links of NCCL: '2>3 40' or '2-3 40' (ms)"),
    ("lazy-loading", "LAZY_LOADING", "whether a kernel's first launch waits for it: 0 or 1 (0)"),
    ("unpinnable", "UNPINNABLE", "file with ranks for which no memory can be pinned, now"),
    ("stall-s", "STALL_S", "seconds without progress until ranks say what waits (10)"),
    ("trace", "TRACE", "folder for traces of all calls (see traces.py)"),
)
FILES = ("links", "unpinnable", "trace")


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """What the libraries read; `given` as the options without dashes."""
    known = {option: variable for option, variable, _ in OPTIONS}
    unknown = set(given) - set(known)
    if unknown:
        raise ValueError(f"no options of the fake machine: {sorted(unknown)}; there are {[*known]}")
    absolute = {k: str(Path(v).absolute()) if k in FILES else str(v) for k, v in given.items()}
    return {f"FAKE_CUDA_{known[option]}": value for option, value in absolute.items()}


def environment(given: Mapping[str, str], base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a process on such a machine, which are `base`'s besides (os.environ's)."""
    libraries = building.build()
    found = {**(os.environ if base is None else base), **variables(given)}
    if "queues" in given:
        found.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(given["queues"]))
    found.setdefault("OMP_NUM_THREADS", "1")
    found["TORCHDYNAMO_DISABLE"] = "1"  # it would compile kernels, and there is nothing to run them
    paths = [str(libraries), *found.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    found["LD_PRELOAD"] = str(libraries / building.RUNTIME)
    return found


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for option, _, text in OPTIONS:
        parser.add_argument(f"--{option}", help=text)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    asked = vars(parser.parse_args(words))
    program = asked.pop("program")
    if not program:
        parser.error("which program is it to run?")
    given = {key.replace("_", "-"): value for key, value in asked.items() if value is not None}
    found = shutil.which(program[0])
    if found is None:
        parser.error(f"there is no program {program[0]!r}")
    try:
        found_variables = environment(given)
    except building.CannotBuild as error:
        sys.exit(f"machine.py: {error}")
    os.execve(found, program, found_variables)


if __name__ == "__main__":
    main(sys.argv[1:])

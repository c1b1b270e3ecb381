"""Run a script whose standard error takes nothing: `full` like a disk, or its reader `gone`."""

import os
import runpy
import sys

if __name__ == "__main__":
    _, fault, *sys.argv = sys.argv
    if fault == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    else:
        read, write = os.pipe()
        os.dup2(write, 2)
        os.close(write)
        os.close(read)
    runpy.run_path(sys.argv[0], run_name="__main__")

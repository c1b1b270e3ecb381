"""Run a script whose standard error takes nothing, like a disk that is full."""

import os
import runpy
import sys

if __name__ == "__main__":
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

"""In the virtual machine: guest.py [--full] OUT NAME...

Runs cases, and writes a line of JSON about each to OUT.
"""

from __future__ import annotations

import json
import sys
import time
import traceback

from soft_roce.verbs_cases import CASES, Size


def main(out: str, names: list[str]) -> None:
    with open(out, "w") as file:
        for name in names:
            start = time.monotonic()
            try:
                outcome = {"passed": True, "text": str(CASES[name]() or "")}
            except ImportError as error:  # Debian's pyverbs is for Debian's version of Python
                outcome = {"passed": True, "text": "", "skipped": str(error)}
            except BaseException:
                outcome = {"passed": False, "text": traceback.format_exc()}
            seconds = round(time.monotonic() - start, 1)
            file.write(json.dumps({"name": name, "seconds": seconds, **outcome}) + "\n")
            file.flush()


if __name__ == "__main__":
    Size.full = "--full" in sys.argv
    out, *names = [word for word in sys.argv[1:] if word != "--full"]
    main(out, names)

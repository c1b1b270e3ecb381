"""In the virtual machine: guest.py [--full] OUT NAME...

Runs cases, and writes a line of JSON about each to OUT. Of one that does not end in time it prints
where it is, and ends.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import traceback

from patience import too_late
from soft_roce.verbs_cases import CASES, Size

LONGEST = 600  # seconds of a case, against hanging: its own waits end much sooner


def main(out: str, names: list[str]) -> None:
    with open(out, "w") as file:
        for name in names:
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            start = time.monotonic()
            try:
                outcome = {"passed": True, "text": str(CASES[name]() or "")}
            except ImportError as error:  # Debian's pyverbs is for Debian's version of Python
                outcome = {"passed": True, "text": "", "skipped": str(error)}
            except BaseException as error:
                late = too_late(error)
                outcome = {"passed": False, "text": traceback.format_exc(), "late": late}
            seconds = round(time.monotonic() - start, 1)
            file.write(json.dumps({"name": name, "seconds": seconds, **outcome}) + "\n")
            file.flush()
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    Size.full = "--full" in sys.argv
    out, *names = [word for word in sys.argv[1:] if word != "--full"]
    main(out, names)

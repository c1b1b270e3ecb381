"""One rank of a part: runs `on_rank` of the part's module, and prints what it returns."""

from __future__ import annotations

import importlib
import json
import os
import sys

from ranks import TOLD
from seat import Seat


def main() -> None:
    given = json.loads(sys.argv[1])
    seat = Seat(
        int(os.environ["RANK"]), given["ranks"], given["gpus"], given["folder"], given["seconds"]
    )
    found = importlib.import_module(given["job"]).on_rank(seat, **given["options"])
    print(TOLD + json.dumps(found), flush=True)
    seat.close()


if __name__ == "__main__":
    main()
    sys.stdout.flush()

"""One rank of a part: runs `on_rank` of the part's module, and prints what it returns."""

from __future__ import annotations

import importlib
import json
import os
import sys

from gpu_check.rank_fixture import RankFixture
from gpu_check.ranks import RESULT


def main() -> None:
    given = json.loads(sys.argv[1])
    fixture = RankFixture(
        int(os.environ["RANK"]), given["ranks"], given["gpus"], given["folder"], given["seconds"]
    )
    found = importlib.import_module("gpu_check." + given["job"]).on_rank(
        fixture, **given["options"]
    )
    print(RESULT + json.dumps(found), flush=True)
    fixture.close()


if __name__ == "__main__":
    main()
    sys.stdout.flush()

"""A rank of the demo that prints what no rank should print."""

import fcntl
import json
import sys
from pathlib import Path

options = json.loads(sys.argv[1])
with Path(options["out"], "ranks.log").open("rb") as turn:
    fcntl.flock(turn, fcntl.LOCK_EX)  # one pipe for all ranks: what both write at once is mixed
    write = sys.stdout.buffer.write
    write(b"caf\xe9 \xff\n@adaptra {broken\n@adaptra 7\n" + b"x" * 2_000_000 + b"\n")
    write(b'@adaptra {"iteration": 3, "ms": {}, "warmup": []}\n')
    sys.stdout.buffer.flush()
Path(options["out"], "summary.json").write_text("{}")

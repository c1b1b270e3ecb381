"""A rank of the demo that prints what no rank should print."""

import json
import sys
from pathlib import Path

options = json.loads(sys.argv[1])
write = sys.stdout.buffer.write
write(b"caf\xe9 \xff\n@adaptra {broken\n@adaptra 7\n" + b"x" * 2_000_000 + b"\n")
write(b'@adaptra {"iteration": 3, "ms": {}, "warmup": []}\n')
Path(options["out"], "summary.json").write_text("{}")

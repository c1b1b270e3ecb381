"""One rank of the demo, for a zygote: its options as JSON."""

import sys

from megatron_adaptra.demo.worker import run_rank

sys.exit(run_rank(sys.argv[1]))

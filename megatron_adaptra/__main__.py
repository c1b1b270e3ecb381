"""`python -m megatron_adaptra` is `adaptra`."""

import sys

from megatron_adaptra.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

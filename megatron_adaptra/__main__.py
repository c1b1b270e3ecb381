"""`python -m megatron_adaptra` is `adaptra`."""

import sys

from megatron_adaptra.base.package import prefer_installed

if __name__ == "__main__":
    prefer_installed("megatron_adaptra")
    from megatron_adaptra.cli.main import main

    sys.exit(main())

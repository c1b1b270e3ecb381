"""Pictures as PNG, by matplotlib."""

from megatron_adaptra.base.errors import MissingPackage


def no_matplotlib() -> MissingPackage:
    """Return the error, to print or raise, for a PNG where matplotlib is not installed."""
    return MissingPackage("a PNG", ["matplotlib"], "'megatron-adaptra[plot]'")

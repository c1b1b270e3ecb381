"""The same pictures as PNG, by matplotlib."""

from megatron_adaptra.base.errors import MissingPackage


def no_matplotlib() -> MissingPackage:
    """What is printed, or raised, where a PNG is asked for and matplotlib is not installed."""
    return MissingPackage("a PNG", ["matplotlib"], "'megatron-adaptra[plot]'")

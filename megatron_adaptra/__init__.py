"""megatron_adaptra: pipeline schedules that adapt to slow links while Megatron-LM trains.

In a script of one's own, after Megatron's groups have been made:

    import megatron_adaptra
    megatron_adaptra.activate()

In Megatron's own training program `register` does it all, from `--adaptra` flags: see run.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_adaptra.adapter.entry.activate import Activation
    from megatron_adaptra.config import AdaptraConfig

__version__ = "0.1.0"


def activate(config: AdaptraConfig | None = None, **settings: Any) -> Activation:
    """Switch the plugin on in this rank, after Megatron's groups have been made.

    All ranks of the job call it.

    Args:
        config: the job's settings, the same on all ranks; made from `settings` if None.
        settings: those of AdaptraConfig by name, e.g. `engine="executor"`. Times are in the unit
            that the flag of that name takes. Ignored where `config` is given.

    Returns:
        The plugin of this rank: `undo()` puts Megatron back as it was.

    Raises:
        BadInput: a setting is unknown or has a value that cannot be used.
        UnsupportedMegatron: this release of Megatron is not known, or has been changed.
        UnsupportedBackend: messages would be on a GPU that some rank cannot open.
        RuntimeError: it is active already.
    """
    # Imported here: the command line's planning half must not load torch.
    from megatron_adaptra.adapter.entry.activate import activate as switch_on
    from megatron_adaptra.config import AdaptraConfig

    if config is None:
        config = AdaptraConfig.from_mapping(settings, "activate()")
    return switch_on(config)


def register() -> None:
    """Add `--adaptra` flags to Megatron's parser; see `adapter.entry.plugin`."""
    from megatron_adaptra.adapter.entry.plugin import register as put_in

    put_in()

"""The decoder layers of a stage: stages with equal ones run the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, config_of, models_of

_DIGITS = 8
_OWN = ("layer_number", "current_microbatch")  # attributes of alike layers that may differ
_PLAIN = (bool, int, float, str)


def layers_of(arguments: ScheduleArgs) -> str:
    """Return a text that is equal for stages whose layers are alike, chunk by chunk.

    Of each chunk it has the number of layers, of their parameters, and a digest of their modules,
    by type, shapes of parameters and settings. It is empty where layers are not known, and with
    experts, as these get other numbers of tokens on each stage.
    """
    if getattr(config_of(arguments), "num_moe_experts", None):
        return ""
    chunks = [_chunk(model) for model in models_of(arguments)]
    return "+".join(chunks) if all(chunks) else ""


def _chunk(model: Any) -> str:
    while not hasattr(model, "decoder") and hasattr(model, "module"):  # a wrapper, such as DDP
        model = model.module
    layers = getattr(getattr(model, "decoder", None), "layers", None)
    if not layers:
        return ""
    text = "\n".join(line for layer in layers for line in _modules(layer))
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    parameters = sum(one.numel() for one in layers.parameters())
    return f"{len(layers)}x{parameters}-{digest}"


def _modules(layer: Any) -> Iterator[str]:
    for module in layer.modules():
        shapes = [tuple(one.shape) for one in module.parameters(recurse=False)]
        settings = sorted(
            f"{name}={value}"
            for name, value in vars(module).items()
            if name not in _OWN and isinstance(value, _PLAIN)
        )
        yield f"{type(module).__name__} {shapes} {settings}"

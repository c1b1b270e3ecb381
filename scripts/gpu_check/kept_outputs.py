"""Megatron keeps what it has sent: a graph's output is a view, which it refuses to free."""

from __future__ import annotations

from typing import Any


def install() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    checked = TransformerConfig.__post_init__

    def keeping(config: Any) -> None:
        checked(config)
        config.deallocate_pipeline_outputs = False

    TransformerConfig.__post_init__ = keeping

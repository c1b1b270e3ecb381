"""Features of Megatron on GPUs, in one table: those that work with the plugin, and the others.

docs/megatron.md shows the table, and the plugin decides by it. Megatron is not imported here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Effect(enum.Enum):
    """An effect names what a pipeline does where a feature of Megatron is used."""

    WORKS = "works"
    EXPECTED = "expected to work, not run on a GPU"
    PINNED = "warmup stays Megatron's; messages may leave the GPU's queue"
    STOCK = "Megatron's own, with one line"


@dataclass(frozen=True)
class Feature:
    """A feature pairs something of Megatron's with its effect on the pipeline.

    `of`: Megatron's flags or words. `why`: a sentence for people. `used`: returns whether a model's
    config asks for the feature; None where nothing has to be decided.
    """

    of: str
    effect: Effect
    why: str
    used: Callable[[Any], bool] | None = None


def _scopes(config: Any) -> set[str]:
    """Return the names of what CUDA graphs hold: a release has one word, a list, or enums."""
    scope = getattr(config, "cuda_graph_scope", None) or ()
    words = [scope] if isinstance(scope, str) else list(scope)
    return {getattr(word, "name", str(word)) for word in words}


def has_graphs(config: Any) -> bool:
    """Return whether a model with this `config` runs as CUDA graphs, in any of Megatron's forms."""
    if getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False):
        return True
    return getattr(config, "cuda_graph_impl", None) not in (None, "none")


def _whole_iteration(config: Any) -> bool:
    if getattr(config, "cuda_graph_impl", None) == "full_iteration":
        return True
    return has_graphs(config) and "full_iteration" in _scopes(config)


def _single_layers(config: Any) -> bool:
    return has_graphs(config) and not _whole_iteration(config)


FEATURES = (
    Feature(
        "CUDA graphs of whole iterations (`--cuda-graph-impl full_iteration`, or the scope of that "
        "name)",
        Effect.STOCK,
        "a replay takes no part of the plugin along, and a wait of the host hangs a capture",
        _whole_iteration,
    ),
    Feature(
        "CUDA graphs of single layers (`--cuda-graph-impl local`, `transformer_engine`)",
        Effect.PINNED,
        "their memory is shared in the order in which they were recorded, which is that of "
        "Megatron's warmup",
        _single_layers,
    ),
    Feature(
        "pipeline messages by UCC (`--pipeline-model-parallel-comm-backend ucc`)",
        Effect.STOCK,
        "nothing is known of how it orders messages on the GPU",
        lambda config: getattr(config, "pipeline_model_parallel_comm_backend", None) == "ucc",
    ),
    Feature(
        "groups given as `pg_collection`",
        Effect.WORKS,
        "where the pipeline's group has the ranks of Megatron's own; with any other it is "
        "Megatron's own, with one line",
    ),
    Feature(
        "`CUDA_DEVICE_MAX_CONNECTIONS=1`, or unset",
        Effect.WORKS,
        "nothing that the plugin puts on a GPU waits for another process, so one hardware queue "
        "does as well as 32",
    ),
    Feature(
        "`--tp-comm-overlap`",
        Effect.EXPECTED,
        "its kernels wait for ranks of the same stage alone, which run the same "
        "ops in the same order",
    ),
    Feature(
        "overlapped gradient reduction and parameter gather, distributed optimizer",
        Effect.WORKS,
        "they stay Megatron's and NCCL's",
    ),
    Feature(
        "FP8 with tensorwise, blockwise or MXFP8 scaling",
        Effect.EXPECTED,
        "messages have the type that Megatron gives them; no forward is recomputed by the plan",
    ),
    Feature(
        "FP8 with delayed scaling (Megatron's default recipe)",
        Effect.EXPECTED,
        "amaxes are all-reduced over replicas in each op, so all replicas run "
        "one order, planned for the first one; no routes, no shares; with `--tp-only-amax-red` "
        "replicas stay independent",
    ),
    Feature(
        "evaluation, checkpoints (also asynchronous ones), timers that synchronise the device, "
        "memory reports",
        Effect.WORKS,
        "between iterations nothing of the plugin's is outstanding on the GPU, and the peak of "
        "allocated memory is never reset",
    ),
)


def effect_of(config: Any, effect: Effect) -> str:
    """Describe the first feature of this `effect` that a model's `config` uses; "" for none."""
    found = (f for f in FEATURES if f.used is not None and f.effect is effect and f.used(config))
    feature = next(found, None)
    return "" if feature is None else f"{feature.of.replace('`', '')}: {feature.why}"

"""What differs between releases of megatron-core: one table, and the check of what is installed."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from megatron_adaptra.errors import UnsupportedMegatron

SUPPORTED = "0.14 to 0.19"


@dataclass(frozen=True)
class Profile:
    """`depth`: where the schedule reads its warmup from: `pp_group` or `total_stages`.

    `groups`: the keyword that takes the process groups.
    """

    first: Version
    depth: str
    groups: str


_PROFILES = (
    Profile(Version("0.17"), depth="total_stages", groups="pg_collection"),
    Profile(Version("0.15"), depth="pp_group", groups="pg_collection"),
    Profile(Version("0.14"), depth="pp_group", groups="grad_finalize_pgs"),
)
# What the seams bind, by keyword; a release that lacks one of these is refused.
_EXPECTED = {
    "forward_step": {
        "forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor",
        "forward_data_store", "config", "cp_group_size", "current_microbatch", "is_last_stage",
    },
    "backward_step": {"input_tensor", "output_tensor", "output_tensor_grad", "config"},
    "forward_backward_pipelining_without_interleaving": {"p2p_communicator", "num_microbatches"},
}  # fmt: skip


def installed_version() -> Version:
    """The release of megatron-core, read without importing it."""
    try:
        return Version(importlib.metadata.version("megatron-core"))
    except importlib.metadata.PackageNotFoundError:
        pass
    try:  # a checkout on the path has no metadata
        from megatron.core.package_info import __version__

        return Version(__version__)
    except ImportError:
        raise UnsupportedMegatron(
            f"megatron-core is not installed; install one of {SUPPORTED}"
        ) from None


def profile() -> Profile:
    """The row for the installed release; raises UnsupportedMegatron."""
    version = installed_version()
    release = Version(f"{version.major}.{version.minor}")
    for row in _PROFILES:
        if release >= row.first:
            return row
    raise UnsupportedMegatron(
        f"megatron-core {version} is not supported; install one of {SUPPORTED}"
    )


def verify(schedules: Any) -> None:
    """Compare the live signatures with what the seams bind; raises UnsupportedMegatron."""
    for name, expected in _EXPECTED.items():
        function = getattr(schedules, name, None)
        have = set(inspect.signature(function).parameters) if function else set()
        missing = sorted(expected - have)
        if missing:
            raise UnsupportedMegatron(
                f"megatron-core {installed_version()}: {name} has no parameter {missing[0]!r}; "
                f"supported are {SUPPORTED}"
            )


def call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call with those of `arguments` that the function takes: signatures drift, names do not."""
    parameters = inspect.signature(function).parameters
    return function(**{k: v for k, v in arguments.items() if k in parameters})

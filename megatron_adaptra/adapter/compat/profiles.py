"""What differs between releases of megatron-core: one table, and the check of what is installed."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from megatron_adaptra.errors import UnsupportedMegatron

SUPPORTED = "0.14 to 0.19"


@dataclass(frozen=True)
class Profile:
    """`depth`: where the schedule reads its warmup from: `pp_group` or `total_stages`.

    `groups`: the keyword that takes the process groups. `waits`: whether an interleaved schedule
    with overlapped messages waits for a send before it frees what is being sent; without, gloo
    delivers garbage.
    """

    first: Version
    depth: str
    groups: str
    waits: bool


_PROFILES = (
    Profile(Version("0.18"), depth="total_stages", groups="pg_collection", waits=True),
    Profile(Version("0.17"), depth="total_stages", groups="pg_collection", waits=False),
    Profile(Version("0.15"), depth="pp_group", groups="pg_collection", waits=False),
    Profile(Version("0.14"), depth="pp_group", groups="grad_finalize_pgs", waits=False),
)
# What the seams bind, by keyword; a release that lacks one of these is refused.
EXPECTED = {
    "forward_step": {
        "forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor",
        "forward_data_store", "config", "cp_group_size", "current_microbatch", "is_last_stage",
    },
    "backward_step": {"input_tensor", "output_tensor", "output_tensor_grad", "config"},
    "forward_backward_pipelining_without_interleaving": {"p2p_communicator", "num_microbatches"},
}  # fmt: skip
EXPECTED_METHODS = {  # of P2PCommunicator
    "__init__": {"pp_group", "config"},
    "recv_forward": {"tensor_shapes", "is_first_stage"},
    "recv_backward": {"tensor_shapes", "is_last_stage"},
    "send_forward": {"output_tensors", "is_last_stage"},
    "send_backward": {"input_tensor_grads", "is_first_stage"},
    "send_forward_recv_backward": {"output_tensors", "tensor_shapes", "is_last_stage"},
    "send_backward_recv_forward": {"input_tensor_grads", "tensor_shapes", "is_first_stage"},
}
NEWEST = Version("0.19")  # what is newer gets the native engine, if its seams match


def installed_version() -> Version:
    """The release of the megatron-core that gets imported, read without importing it.

    A checkout on the path counts before an installed wheel, as it does for Python.
    """
    spec = importlib.util.find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        info = Path(folder) / "core" / "package_info.py"
        if info.is_file():
            return _version_in(info.read_text())
    raise UnsupportedMegatron(f"megatron-core is not installed; install one of {SUPPORTED}")


def _version_in(source: str) -> Version:
    """MAJOR to PRE_RELEASE, as package_info.py of every release assigns them."""
    parts = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            parts[ast.unparse(node.targets[0])] = node.value.value
    release = ".".join(str(parts[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    return Version(release + str(parts.get("PRE_RELEASE", "")))


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


def is_known() -> bool:
    """Whether the installed release belongs to a line that the tests have seen."""
    version = installed_version()
    return Version(f"{version.major}.{version.minor}") <= NEWEST


def verify(schedules: Any, communicator: type, row: Profile) -> None:
    """Compare the live code with what the seams bind; raises UnsupportedMegatron."""
    for holder, table in ((schedules, EXPECTED), (communicator, EXPECTED_METHODS)):
        for name, expected in table.items():
            function = getattr(holder, name, None)
            have = set(inspect.signature(function).parameters) if function else set()
            _need(not expected - have, f"{name} has no parameter {sorted(expected - have)}")
    # Where the warmup comes from is the one thing bound that no signature tells.
    code = inspect.getsource(schedules.forward_backward_pipelining_without_interleaving)
    _need(row.depth in code, f"the 1F1B schedule does not read its warmup from {row.depth}")


def _need(fits: bool, what: str) -> None:
    if not fits:
        raise UnsupportedMegatron(
            f"megatron-core {installed_version()}: {what}; supported are {SUPPORTED}"
        )


def call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call with those of `arguments` that the function takes: signatures drift, names do not."""
    taken = _parameters(function)
    return function(**{k: v for k, v in arguments.items() if k in taken})


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)

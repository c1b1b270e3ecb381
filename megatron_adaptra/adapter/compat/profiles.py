"""Differences between releases of megatron-core: one table, and the check of the installed one."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from megatron_adaptra.adapter.compat.patch_attr import find
from megatron_adaptra.base.errors import UnsupportedMegatron

SUPPORTED = "0.14 to 0.19"


@dataclass(frozen=True)
class Profile:
    """A profile describes the releases from `first` on, up to the next profile's.

    `depth`: where the schedule reads its warmup from: `pp_group` or `total_stages`. `groups`: the
    keyword that takes the process groups. `waits`: whether an interleaved schedule with overlapped
    messages waits for a send before it frees what is being sent; without, gloo delivers garbage.
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
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_P2P = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator"
_RANDOM = "megatron.core.tensor_parallel.random"
# The functions that we call, with the parameters that we pass by keyword; those that we patch are
# in patches.py. A release that lacks one of these is refused.
NEEDED: Mapping[str, set[str]] = {
    f"{_SCHEDULES}:forward_step": {
        "forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor",
        "forward_data_store", "config", "cp_group_size", "current_microbatch", "is_last_stage",
    },
    f"{_SCHEDULES}:backward_step": {
        "input_tensor", "output_tensor", "output_tensor_grad", "config",
    },
    f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving": {
        "p2p_communicator", "num_microbatches",
    },
    f"{_SCHEDULES}:forward_backward_pipelining_with_interleaving": {
        "p2p_communicator", "num_microbatches",
    },
    f"{_SCHEDULES}:get_model_config": set(),
    f"{_SCHEDULES}:get_tensor_shapes": {
        "seq_length", "micro_batch_size", "decoder_seq_length", "config", "tp_group", "cp_group",
    },
    f"{_P2P}.__init__": {"pp_group", "config"},
    f"{_P2P}.recv_forward": {"tensor_shapes", "is_first_stage"},
    f"{_P2P}.recv_backward": {"tensor_shapes", "is_last_stage"},
    f"{_P2P}.send_forward": {"output_tensors", "is_last_stage"},
    f"{_P2P}.send_backward": {"input_tensor_grads", "is_first_stage"},
    f"{_P2P}.send_forward_recv_backward": {"output_tensors", "tensor_shapes", "is_last_stage"},
    f"{_P2P}.send_backward_recv_forward": {
        "input_tensor_grads", "tensor_shapes", "is_first_stage",
    },
}  # fmt: skip
# The same for the executor alone: without one of these, engine native runs.
NEEDED_BY_EXECUTOR: Mapping[str, set[str]] = {
    f"{_SCHEDULES}:check_first_val_step": set(),
    f"{_SCHEDULES}:clear_embedding_activation_buffer": set(),
    f"{_SCHEDULES}:deallocate_output_tensor": set(),
    f"{_SCHEDULES}:finish_embedding_wgrad_compute": set(),
    f"{_RANDOM}:_get_all_rng_states": set(),
    f"{_RANDOM}:_set_all_rng_states": set(),
    f"{_RANDOM}:_fork_rng": set(),
}
NEWEST = Version("0.19")  # newer releases get the native engine, if their seams match


@functools.cache  # asked in every iteration
def installed_version() -> Version:
    """Return the release of the megatron-core that gets imported, without importing it.

    A checkout on the path counts before an installed wheel, as it does for Python. Raises
    UnsupportedMegatron if there is none.
    """
    spec = importlib.util.find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        info = Path(folder) / "core" / "package_info.py"
        if info.is_file():
            return _version_in(info.read_text())
    raise UnsupportedMegatron(f"megatron-core is not installed; install one of {SUPPORTED}")


def _version_in(source: str) -> Version:
    """Return the version that a package_info.py, `source`, assigns as MAJOR to PRE_RELEASE."""
    parts = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            parts[ast.unparse(node.targets[0])] = node.value.value
    release = ".".join(str(parts[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    return Version(release + str(parts.get("PRE_RELEASE", "")))


def profile() -> Profile:
    """Return the row for the installed release; raises UnsupportedMegatron where there is none."""
    version = installed_version()
    release = Version(f"{version.major}.{version.minor}")
    for row in _PROFILES:
        if release >= row.first:
            return row
    raise UnsupportedMegatron(
        f"megatron-core {version} is not supported; install one of {SUPPORTED}"
    )


def is_known() -> bool:
    """Return whether the installed release is of a line that the tests have run on."""
    version = installed_version()
    return Version(f"{version.major}.{version.minor}") <= NEWEST


def verify(row: Profile) -> None:
    """Check that the installed Megatron has what the plugin calls; `row`: its own profile.

    Raises UnsupportedMegatron where it has not.
    """
    if words := lacking(NEEDED):
        raise misfit(words)
    from megatron.core.pipeline_parallel import schedules

    # The source of the warmup is the one thing needed that no signature shows.
    code = inspect.getsource(schedules.forward_backward_pipelining_without_interleaving)
    if row.depth not in code:
        raise misfit(f"the 1F1B schedule does not read its warmup from {row.depth}")


def lacking(needed: Mapping[str, set[str]]) -> str:
    """Describe the first entry of `needed`, a table like NEEDED, that is missing; "" for none."""
    for target, expected in needed.items():
        try:
            function = getattr(*find(target))
        except (ImportError, AttributeError):
            return f"{target} does not exist"
        have = inspect.signature(function).parameters.keys() if expected else set()
        if missing := expected - have:
            return f"{target} has no parameter {', '.join(sorted(missing))}"
    return ""


def misfit(what: str) -> UnsupportedMegatron:
    """Return the error that states in one line, `what`, how the installed Megatron does not fit."""
    return UnsupportedMegatron(
        f"megatron-core {installed_version()}: {what}; supported are {SUPPORTED}"
    )


def call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call `function` with those of `arguments` that it takes: signatures drift, names do not."""
    taken = _parameters(function)
    return function(**{k: v for k, v in arguments.items() if k in taken})


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)

"""How messages of GPUs will be staged in the host's memory: whether it is pinned, and whose."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_adaptra.base.errors import DeviceFailed, line_of
from megatron_adaptra.device import gpu_bindings
from megatron_adaptra.device.pci import in_sysfs, node_near
from megatron_adaptra.doctor.finding import Finding, ok, warn
from megatron_adaptra.transport.engine.bindings import new_engine
from megatron_adaptra.view.axis import size

WHAT = "staging"
TRIED = 64 << 20  # bytes: of a large message
_UNLIMITED = "ulimit -l unlimited (containers: --ulimit memlock=-1)"
# No setting limits the pool alone.
_POOL = (
    "the pool has no size of its own: what the plan's messages take, within "
    "--adaptra-activation-budget where that is in bytes"
)


def staging() -> Iterator[Finding]:
    """Check how the first GPU's driver pins as much memory as a large message takes."""
    if gpu_bindings.missing():
        yield ok(WHAT, "none in force: without a GPU messages leave from where they are")
        return
    try:
        copied, unpinned, far = _tried()
    except (DeviceFailed, RuntimeError) as error:
        remedy = "nvidia-smi says whether another process has the GPU for itself"
        yield warn(WHAT, f"not tried, for the GPU cannot be opened: {line_of(error)}", remedy)
        return
    tried = f"{size(TRIED)} tried"
    if unpinned:
        says = f"not pinned, so that copies take longer: {line_of(unpinned)} ({tried})"
        yield warn(WHAT, says, _UNLIMITED)
    elif copied:
        says = "pinned, but memory of the driver, from where the engine copies once more: "
        yield warn(WHAT, f"{says}{line_of(copied)} ({tried}); {_POOL}", _UNLIMITED)
    elif far:
        says = f"pinned, memory of the engine, but not on the GPU's NUMA node: {far} ({tried}); "
        yield warn(WHAT, f"{says}{_POOL}", "containers: --cap-add SYS_NICE")
    else:
        yield ok(WHAT, f"pinned, memory of the engine ({tried}); {_POOL}")


def _tried() -> tuple[str, str, str]:
    """Return three faults: copied once more, not pinned, not near the GPU; empty for none."""
    device = gpu_bindings.open_device(0)
    engine = new_engine(1 << 20, 1 << 20, 5.0)
    pinned = gpu_bindings.new_pinned(device, engine, TRIED)
    try:
        node = node_near(in_sysfs(device.pci()))
        far = "" if node is None else engine.prefer_node(node)
        unpinned = pinned.reserve(TRIED, 1)
        return pinned.copied(), unpinned, far
    finally:
        pinned.close(device)
        device.close(5.0)
        engine.close("the doctor has seen it")

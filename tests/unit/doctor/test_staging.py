"""What the doctor finds about the host's memory for messages of GPUs, over a made-up driver."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from fakes.controlled_cuda.gpu import Driver, native_threads, run

from megatron_adaptra.device import gpu_bindings
from megatron_adaptra.doctor.finding import Finding, Status
from megatron_adaptra.doctor.gpus import TRIED, gpus, staging

OK, WARN, _ = Status
OUT_OF_MEMORY, NOT_PERMITTED = 2, 800
UNLIMITED = "ulimit -l unlimited (containers: --ulimit memlock=-1)"
POOL = (
    "the pool has no size of its own: what the plan's messages take, within "
    "--adaptra-activation-budget where that is in bytes"
)


def found(driver: Driver, refused: int, call: str) -> Finding:
    before = driver.left()
    if refused and call:
        driver.fail(call, code=refused)
    elif refused:
        driver.refuse_pinning(refused)
    (finding,) = staging()
    left = driver.left()
    assert left == before, "nothing stays pinned, and the GPU is closed"
    assert not {"adaptra-device", "adaptra-pins"} & set(native_threads())
    assert finding.what == "staging"
    return finding


def near(driver: Driver, node: int) -> Finding:
    with patch("megatron_adaptra.doctor.gpus.node_near", lambda pci: node):
        return found(driver, 0, "")


def test_memory_of_the_engine_is_pinned() -> None:
    assert TRIED == 64 << 20
    says = f"pinned, memory of the engine (64 MiB tried); {POOL}"
    assert run(found, 0, "") == (OK, "staging", says, "")


@pytest.mark.parametrize(("node", "why"), [(0, ""), (63, "mbind: Invalid argument")])
def test_memory_that_is_not_on_the_gpus_node(node: int, why: str) -> None:
    finding = run(near, node)
    assert finding.status is (WARN if why else OK)
    where = f", but not on the GPU's NUMA node: {why}" if why else ""
    assert finding.says == f"pinned, memory of the engine{where} (64 MiB tried); {POOL}"
    assert finding.remedy == ("containers: --cap-add SYS_NICE" if why else "")


def test_memory_of_the_driver_is_pinned_instead() -> None:
    finding = run(found, NOT_PERMITTED, "cuMemHostRegister_v2")
    assert (finding.status, finding.remedy) == (WARN, UNLIMITED)
    assert finding.says == (
        "pinned, but memory of the driver, from where the engine copies once more: "
        f"cuMemHostRegister says CUDA_ERROR_OTHER (800, some error) (64 MiB tried); {POOL}"
    )


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, NOT_PERMITTED])
def test_memory_that_is_not_pinned_is_a_warning(code: int) -> None:
    finding = run(found, code, "")
    assert (finding.status, finding.remedy) == (WARN, UNLIMITED)
    assert finding.says.startswith("not pinned, so that copies take longer: cuMemHost")
    assert f"({code}" in finding.says
    assert finding.says.endswith("(64 MiB tried)")


def closed(driver: Driver) -> Finding:
    driver.fail("cuDevicePrimaryCtxRetain", code=OUT_OF_MEMORY)
    (finding,) = staging()
    return finding


def test_a_gpu_that_cannot_be_opened_is_not_tried() -> None:
    finding = run(closed)
    assert finding.status is WARN
    assert finding.says.startswith("not tried, for the GPU cannot be opened: ")


@pytest.mark.parametrize("why", ["there is no driver", "cuInit says no"])
def test_without_a_gpu_nothing_is_staged(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bindings, "missing", lambda: why)
    says = "none in force: without a GPU messages leave from where they are"
    assert list(staging()) == [(OK, "staging", says, "")]
    assert [f for f in gpus() if f.what == "staging"] == [(OK, "staging", says, "")]

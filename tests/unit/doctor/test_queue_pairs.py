"""What the doctor finds when it opens queue pairs, over RDMA devices that are made up."""

from __future__ import annotations

import pytest
from fakes.controlled_verbs.pair import IPV4, Pair
from fakes.controlled_verbs.verbs import Fabric, run

from megatron_adaptra.doctor.engine import opened
from megatron_adaptra.doctor.finding import Finding, Status


def found(fabric: Fabric, environ: dict[str, str], registrations: int) -> list[Finding]:
    for device in (0, 1):
        fabric.port(device, keys=2)
        fabric.gid(device, 3, IPV4.format(device + 1))
    fabric.registrations(registrations)
    pair = Pair({}, environ)
    findings = list(opened(pair.rails))
    pair.close()
    return findings


MEMORY = "cannot register memory (`ulimit -l` should say unlimited): Cannot allocate memory"
LOCKED = "ulimit -l unlimited (containers: --ulimit memlock=-1)"
KEYS = "/sys/class/infiniband/made_up1/ports/1/pkeys"


@pytest.mark.parametrize(
    ("environ", "registrations", "expected"),
    [
        ({}, -1, []),
        ({}, 0, [(f"made_up{n}", f"made_up{n} {MEMORY}", LOCKED) for n in (0, 1)]),
        # Two for each queue pair.
        ({}, 3, [("made_up1", f"made_up1 {MEMORY}", LOCKED)]),
        (
            {"NCCL_IB_PKEY": "5"}, -1,
            [("made_up1",
              "port 1 of made_up1 has 2 partition keys, from 0 on, and none at 5 (NCCL_IB_PKEY)",
              f"export NCCL_IB_PKEY= to the place of one: grep . {KEYS}/*")],
        ),
        (
            {"NCCL_IB_GID_INDEX": "7"}, -1,
            [("made_up1", "port 1 of made_up1: GID 7 is empty",
              "unset NCCL_IB_GID_INDEX, or export the index of a GID that show_gids lists")],
        ),
    ],
)  # fmt: skip
def test_a_queue_pair_that_cannot_be_opened_has_a_line_with_its_remedy(
    environ: dict[str, str], registrations: int, expected: list[tuple[str, str, str]]
) -> None:
    assert run(found, environ, registrations) == [
        (Status.WARN, f"queue pair {device}:1", f"{says}: messages do without it", remedy)
        for device, says, remedy in expected
    ]

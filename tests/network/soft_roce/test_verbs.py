"""The engine over real ibverbs: each test is a case (verbs_cases.py) in one virtual machine."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.soft_roce.vm import prepared, run_cases
from patience import TooLate
from soft_roce.verbs_cases import CASES

from megatron_adaptra.transport.engine.bindings import missing

SECONDS = 1500  # for all cases; nothing is measured with it
# Of the others --full alone runs each.
USUAL = (
    "ports_are_found_with_a_reason_for_their_address", "the_only_rail_flaps", "all_packets_lost",
    "messages_of_all_sizes_go_both_ways_over_both_rails", "a_killed_process_is_named",
)  # fmt: skip
ALL = [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.large]) for name in CASES]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of all cases that are run, by name."""
    if missing():
        pytest.skip(f"no engine: {missing()}")
    made, why = prepared()
    if made is None:
        pytest.skip(why)
    chosen = [
        i.callspec.params["name"] for i in request.session.items if i.module is request.module
    ]
    names = [name for name in CASES if name in chosen]
    exchange = tmp_path_factory.mktemp("exchange")
    return run_cases(made, exchange, names, request.config.getoption("--full"), SECONDS)


@pytest.mark.vm
@pytest.mark.timeout(SECONDS + 1000)
@pytest.mark.parametrize("name", ALL)
def test_verbs(name: str, outcomes: Any) -> None:
    outcome = outcomes[name]
    if "skipped" in outcome:
        pytest.skip(f"in the virtual machine: {outcome['skipped']}")
    print(f"{name}: {outcome['seconds']} s in the machine\n{outcome['text']}")
    if outcome.get("late"):
        raise TooLate(outcome["text"].splitlines()[-1])
    assert outcome["passed"]

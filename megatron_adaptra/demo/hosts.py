"""The hosts of a laboratory in the demo: what their ports pass, and when."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import size
from megatron_adaptra.demo.numbered import LATE
from megatron_adaptra.emulate.rules import LinkRule, PortRule

HOST = "--host"
PORTS = "all:5MB/s"  # beside late ranks, unless it is given


def check_hosts(
    hosts: Sequence[str], netlab: bool, late: bool, links: Sequence[str], paths: Sequence[str]
) -> None:
    """Raise BadInput for impossible `hosts`, or for links that cannot be slow beside them.

    `hosts`: rules of ports. `netlab`: in a laboratory. `late`: some ranks are late. `links`,
    `paths`: the slow ones.
    """
    text = ",".join(hosts)
    if hosts and not netlab:
        raise BadInput(HOST, text, "it needs --netlab, whose hosts have ports")
    if hosts and not late and "@" in text:
        when = "--from-iteration and --to-iteration have the period, unless ranks come late"
        raise BadInput(HOST, text, f"leave out what begins with @: {when}")
    if netlab and (hosts or late) and (slow := [*links, *paths]):
        beside = f"--netlab and {LATE if late else HOST}"
        allowed = (
            f"it has no place beside {beside}, where ports of hosts have rates, and no link can be "
            "slow"
        )
        raise BadInput("--slow-link" if links else "--slow-path", ",".join(slow), allowed)


def port_texts(
    hosts: Sequence[str], netlab: bool, late: bool, slow_phase: tuple[int, int]
) -> list[str]:
    """The rules of the laboratory's ports, in the syntax of `--host`.

    `hosts`, `netlab`, `late`: as for `check_hosts`. Beside late ranks rules hold in the whole run,
    or as each of `hosts` has it; else ports are what gets slow in `slow_phase`, the first iteration
    and the one after the last.
    """
    if not netlab:
        return []
    if late:
        return list(hosts) or [PORTS]
    return [f"{rule}@{slow_phase[0]}..{slow_phase[1]}" for rule in hosts]


def names(rules: Sequence[PortRule]) -> list[str]:
    """The hosts in `rules`, each with its rate, `2:20MB/s`; of several rules the first counts."""
    rates = {rule.host: rule.rate for rule in reversed(rules)}
    return [f"{host}:{size(rate)}/s" for host, rate in sorted(rates.items())]


def changes(rules: Sequence[LinkRule | PortRule], iterations: int) -> set[int]:
    """Return those of the run's `iterations` in which one of the `rules` begins or ends.

    Turns of the arms end there: the laboratory counts an iteration once both arms have run it.
    """
    ends = {end for rule in rules for end in (rule.first, rule.end)}
    return {int(end) for end in ends if 0 < end < iterations}

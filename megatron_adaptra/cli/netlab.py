"""`adaptra netlab`: several hosts on this machine, joined by links that are really slow."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import number, parse_seconds, whole
from megatron_adaptra.cli.output import print_json, try_stdout
from megatron_adaptra.emulate.rules import PORT_SYNTAX, SYNTAX, parse_port_rules
from megatron_adaptra.emulate.scenario import hosts_in, load_rules
from megatron_adaptra.netlab.lab import Lab
from megatron_adaptra.netlab.loop import Output
from megatron_adaptra.netlab.measure import Measured
from megatron_adaptra.netlab.shaper import SHAPERS

_EXAMPLE = """example: stock Megatron-LM, one rank per host, 40 ms each way between hosts 2 and 3
  adaptra netlab run --hosts 4 --link 2-3:40ms -- torchrun pretrain_gpt.py <its flags>

Each host is a network namespace with the address 10.77.0.<index + 1>. A command finds RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT, HOST_INDEX, HOST_IP, GLOO_SOCKET_IFNAME and the variables that
torchrun takes its node's rank and rendezvous from; {index} and {ip} in its words are replaced.
Needs root, and either the kernel's netem with iproute2, or /dev/net/tun. Nothing is left behind."""
_TIMED_OUT = 124  # the exit status, as of timeout(1), of a command that ends well when it has to
SHAPED_BY = {
    "netem": "links are shaped by the kernel's netem",
    "relay": "links are shaped by a relay in user space",
}


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    parser = subparsers.add_parser(
        "netlab",
        help="run a command on several hosts of a slow network, all on this machine",
        description="Run a command on every host of a laboratory: network namespaces of this "
        "machine,\njoined by links with delay, jitter, rate and loss of your choice.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("do", choices=("run", "measure"), help="run a command, or only measure")
    parser.add_argument(
        "scenario",
        nargs="*",
        metavar="SCENARIO",
        help="YAML file of links, such as configs/scenarios/slow_link.yaml",
    )
    parser.add_argument(
        "--link", action="append", default=[], metavar="RULE", help=SYNTAX.replace("%", "%%")
    )
    parser.add_argument("--host", action="append", default=[], metavar="RULE",
        help=f"{PORT_SYNTAX}; without slow links")  # fmt: skip
    parser.add_argument("--delay", default="0", metavar="TIME",
        help="beside --host: from each host to each other one, such as 10ms")  # fmt: skip
    parser.add_argument(
        "--hosts",
        type=whole,
        metavar="N",
        help="number of hosts (default: as many as the links need)",
    )
    parser.add_argument("--shaper", choices=SHAPERS, default="auto",
        help="what slows links: the kernel's netem, or a relay in user space "
        "(default: netem where the kernel and iproute2 can, else the relay)")  # fmt: skip
    parser.add_argument("--seed", type=whole, default=0, metavar="N",
        help="random seed of the relay's jitter and loss (default: 0)")  # fmt: skip
    parser.add_argument("--timeout", type=number, default=math.inf, metavar="SECONDS",
        help="end the command then (default: never)")  # fmt: skip
    parser.add_argument("--no-measure", action="store_true", help="do not measure the links first")
    parser.add_argument("--json", action="store_true",
        help="print one JSON object, after the command's output")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the hosts, measure their links, run the command; the largest exit status of all hosts.

    Raises BadInput for `run` without a command, and where its output cannot go anywhere.
    """
    if args.do == "run" and not (args.command and args.command[0]):
        raise BadInput("COMMAND", None, "adaptra netlab run ... -- COMMAND ARGUMENTS")
    if not args.timeout > 0:
        raise BadInput("--timeout", args.timeout, "it has to be a number of seconds above 0")
    try_stdout()
    texts = [*args.link, *args.scenario]
    hosts = max(2, hosts_in(texts)) if args.hosts is None else args.hosts
    rules = load_rules(texts, hosts, network=True, flag="--link")
    ports = [rule for text in args.host for rule in parse_port_rules(text, hosts, "--host")]
    if rules and ports:
        raise BadInput("--host", args.host[0], "a laboratory has slow links, or rates of hosts")
    delay = parse_seconds(args.delay, "--delay") if args.delay != "0" else 0.0
    if delay and not ports:
        raise BadInput("--delay", args.delay, "it needs --host; a link has a delay of its own")
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(f"adaptra: {text}", soft_wrap=True, markup=False, highlight=False)

    status, measured = 0, []
    with Lab(hosts, rules, args.seed, args.shaper, ports, delay) as lab:
        why = f" (no netem: {lab.why})" if lab.why else ""
        how = SHAPED_BY[lab.shaper] if rules or lab.shaper == "relay" else "joined by a bridge"
        if ports:
            idle = "on" if lab.tcp["slow_start_after_idle"] else "off"
            how = (
                f"ports are shaped by the kernel's tbf; TCP: {lab.tcp['congestion_control']}, "
                f"MTU {lab.tcp['mtu']}, {lab.tcp['segments']} bytes at once, "
                f"slow start after idle {idle}"
            )
        say(f"{hosts} hosts; {how}{why}")
        if (rules or ports) and not args.no_measure:
            measured = lab.measure()
            console.print(_table(measured))
            for each in measured:
                if each.fault:
                    link = f"{each.rule.source}>{each.rule.target}"
                    say(f"this machine does not keep link {link}: {each.fault}")
        if args.do == "run":
            out = Output(sys.stdout.fileno())

            def show(host: int, line: bytes) -> None:
                out.write(b"[%d] %s\n" % (host, line))

            statuses = lab.run(args.command, os.environ, show, args.timeout, out.full)
            out.drain()
            traffic = lab.traffic
            late = ""
            if traffic.held:
                late = (
                    f"; 99 % of {traffic.held} held ones left less than "
                    f"{traffic.late_ms(0.99)} ms late"
                )
            say(
                f"{traffic.packets} packets, {traffic.bytes / 1e6:.1f} MB, "
                f"{traffic.lost} lost{late}"
            )
            for index, ended in enumerate(statuses):
                if ended and index not in lab.overdue:
                    say(f"the command ended with {ended} on host {index}")
            if lab.overdue:
                where = ", ".join(map(str, lab.overdue))
                say(f"--timeout {args.timeout:g} is over: the command was ended on host {where}")
            status = max(statuses) or (_TIMED_OUT if lab.overdue else 0)
        elif any(each.fault for each in measured):
            status = 1
        if args.json:
            print_json(_plain(measured, lab))
    return status


def _table(measured: Sequence[Measured]) -> Table:
    table = Table(title="links, requested / measured", title_justify="left", box=None)
    for head in ("link", "delay ms", "jitter ms", "rate MB/s", "loss %"):
        table.add_column(head, justify="left" if head == "link" else "right")
    for m in measured:
        rule = m.rule
        rate = "-"
        if math.isfinite(rule.bandwidth):
            rate = f"{rule.bandwidth / 1e6:g} / {m.bandwidth / 1e6:.1f}"
        table.add_row(
            f"{rule.source}>{rule.target}",
            f"{1e3 * rule.delay:g} / {1e3 * m.delay:.1f}",
            f"{1e3 * rule.jitter:g} / {1e3 * m.jitter:.1f}",
            rate,
            f"{100 * rule.loss:g} / {100 * m.loss:.1f}",
        )
    return table


def _plain(measured: Sequence[Measured], lab: Lab) -> dict[str, Any]:
    def figures(of: Any) -> dict[str, float | None]:
        """Return the figures of a rule or of a measurement; None for an infinite one."""
        values = {
            "delay_ms": 1e3 * of.delay,
            "jitter_ms": 1e3 * of.jitter,
            "bandwidth": of.bandwidth,
            "loss": of.loss,
        }
        return {k: value if math.isfinite(value) else None for k, value in values.items()}

    traffic = lab.traffic
    return {
        "shaper": lab.shaper,
        "tcp": lab.tcp,
        "links": [
            {
                "link": f"{m.rule.source}>{m.rule.target}",
                "requested": figures(m.rule),
                "measured": figures(m),
                "fault": m.fault,
            }
            for m in measured
        ],
        "packets": traffic.packets,
        "bytes": traffic.bytes,
        "lost": traffic.lost,
    }

"""The laboratory: hosts, the network between them, and a command that runs on each."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_adaptra.base.errors import AdaptraError, BadInput, Interrupted
from megatron_adaptra.emulate.rules import LinkRule, PortRule
from megatron_adaptra.netlab import host, measure, namespace, user
from megatron_adaptra.netlab.loop import Loop
from megatron_adaptra.netlab.measure import Measured
from megatron_adaptra.netlab.network import INTERFACE, Link, Network, Traffic, address
from megatron_adaptra.netlab.ports import BURST, Ports
from megatron_adaptra.netlab.shaper import build, choose

MOST_HOSTS = 64
FAILED_GRACE = 60.0  # seconds the other hosts get once the command has failed on one
GRACE = 20.0  # seconds between SIGTERM and SIGKILL
PORT = 29500
_LONGEST_LINE = 1 << 20  # bytes; what goes on longer is cut
_RULES_EVERY = 0.01  # seconds between two looks at which rules are in force
_ITERATION = re.compile(rb"\biteration +(\d+)[/:, ]")  # Megatron's log line, and our progress


class Lab:
    """A context manager: hosts with slow links between them, on this machine.

    Args:
        hosts: how many, 2 to 64.
        rules: links that are slow for some iterations, read from what the command prints, or some
            seconds of its run. The first rule that fits is in force.
        seed: of a relay's jitter and loss.
        shaper: one of shaper.SHAPERS. Afterwards `shaper` is the one in use, and `why` is why it
            is not netem.
        ports: rates of hosts, instead of `rules`, in force as these are. `tcp` has then what holds
            for connections, as from `Ports.tcp`.
        delay: seconds from each host to each other one, beside `ports`.

    Raises:
        BadInput: the number of hosts.
        AdaptraError: on entry, where the machine does not allow a laboratory, or not one with slow
            links and rates of hosts.
    """

    def __init__(
        self,
        hosts: int,
        rules: Sequence[LinkRule],
        seed: int = 0,
        shaper: str = "auto",
        ports: Sequence[PortRule] = (),
        delay: float = 0.0,
    ) -> None:
        if not 2 <= hosts <= MOST_HOSTS:
            raise BadInput("--hosts", hosts, f"it has to be 2 to {MOST_HOSTS}")
        self.rules, self.ports, self._delay = tuple(rules), tuple(ports), delay
        self.tcp: dict[str, str | int | bool] = {}
        self.shaper, self.why = shaper, ""
        self._count, self._seed = hosts, seed
        self._hosts: list[host.Host] = []
        self.iteration = 0  # the one under way
        self.overdue: list[int] = []  # hosts whose command the limit of `run` has ended
        self._began = 0.0
        self._shaped = (-1, 0.0)  # for which iteration, and until when
        self._interrupted, self._signum = "", 0  # by what

    def __enter__(self) -> Lab:
        if os.geteuid() != 0:
            raise AdaptraError("the laboratory makes network namespaces: run it as root")
        if lacks := user.missing_capabilities():
            add = " ".join(f"--cap-add={name}" for name in lacks)
            raise AdaptraError(
                "the laboratory makes network namespaces: this root lacks "
                f"{' and '.join(lacks)} (containers: {add})"
            )
        user.caller()  # raises before anything is made if its user is unclear
        self.shaper, self.why = choose(self.shaper, bool(self.rules), bool(self.ports))
        with contextlib.ExitStack() as undo:
            self._loop = Loop()
            undo.callback(self._loop.close)
            self._parent = _parent()
            if self._parent is not None:
                undo.callback(os.close, self._parent)
                self._loop.watch(self._parent, self._abandoned)
            undo.callback(self._end)
            for index in range(self._count):
                self._hosts.append(host.start(index, measure.tasks))
            # Kept until the end: what a host has sent still arrives when its command has ended.
            namespaces = []
            for each in self._hosts:
                namespaces.append(namespace.of(each.pid))
                undo.callback(os.close, namespaces[-1])
            pids, links = [h.pid for h in self._hosts], [(r.source, r.target) for r in self.rules]
            self._network: Network = build(
                self.shaper, namespaces, pids, links, self._loop, self._seed, bool(self.ports),
                self._delay,
            )  # fmt: skip
            undo.callback(self._network.close)
            if isinstance(self._network, Ports):
                self.tcp = self._network.tcp()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()  # before their network
        self._undo.close()

    @property
    def traffic(self) -> Traffic:
        """The traffic that has crossed the network until now."""
        return self._network.traffic

    def measure(self) -> list[Measured]:
        """Measure each rule on its own, with an idle network; a host's port each way.

        Raises AdaptraError if a host does not answer, or what started the laboratory ends.
        """
        results = []
        for rule in dict.fromkeys(replace(r, first=0, timed=False) for r in self.rules):
            self._network.shape({(rule.source, rule.target): rule})
            results.append(self._measure(rule))
        self._network.shape({})
        for number, rate in dict.fromkeys((rule.host, rule.rate) for rule in self.ports):
            self._set_rates({number: rate})
            other = (number + 1) % self._count
            for source, target in ((number, other), (other, number)):
                rule = LinkRule(source, target, self._delay, bandwidth=rate)
                results.append(self._measure(rule, BURST))
        self._set_rates({})
        return results

    def _measure(self, rule: LinkRule, burst: int = 0) -> Measured:
        """Measure the link of `rule`; a `burst` of so many bytes is not held to its rate."""
        source, target = self._hosts[rule.source], self._hosts[rule.target]
        rounds = []
        for send, collect in measure.rounds_of(rule, burst):
            source.send(**send)
            target.send(**collect)
            rounds.append(self._answers(source, target)[target.index]["seen"])
        return measure.result(rule, rounds, burst)

    def _set_rates(self, rates: Mapping[int, float]) -> None:
        if isinstance(self._network, Ports):
            self._network.set_rates([rates.get(each.index, math.inf) for each in self._hosts])

    def _answers(self, *hosts: host.Host) -> dict[int, dict[str, Any]]:
        answered: dict[int, dict[str, Any] | None] = {}
        for each in hosts:

            def ready(each: host.Host = each) -> None:
                answered[each.index] = each.receive()

            self._loop.watch(each.control.fileno(), ready)
        done = self._loop.run(lambda: bool(self._interrupted) or len(answered) == len(hosts), 30.0)
        for each in hosts:
            self._loop.unwatch(each.control.fileno())
        if self._interrupted:
            raise AdaptraError(self._interrupted)
        answers = {index: answer for index, answer in answered.items() if answer is not None}
        if not done or len(answers) < len(hosts):
            raise AdaptraError("a host of the laboratory has not answered in 30 s")
        return answers

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[int, bytes], None],
        limit: float = math.inf,
        full: Callable[[], bool] = lambda: False,
        on_signal: Callable[[int], bool] = lambda _: False,
    ) -> list[int]:
        """Run `command` on every host, for `limit` seconds at most; the exit statuses.

        `overdue` has the hosts on which the limit has ended it.

        `on_line(host, line)` gets its output; while `full()`, which is asked again and again, the
        command waits until it can print more. In words of the command {index} and {ip} are
        replaced. To `environment` are added the variables that torchrun reads (one rank per host)
        and those of a rank by itself. SIGTERM and SIGINT end all, and raise Interrupted, unless
        `on_signal` of the signal is true: the command ends by itself.
        """
        self._began = time.monotonic()
        rest = {each.index: b"" for each in self._hosts}

        def read(each: host.Host) -> bool:
            data = os.read(each.output, 65536)
            *lines, rest[each.index] = (rest[each.index] + data).split(b"\n")
            if self._interrupted and full():  # it shall end, and not wait for a reader
                lines, rest[each.index] = [], b""
            for line in lines:
                if found := _ITERATION.search(line):
                    self.iteration = max(self.iteration, int(found[1]))
                on_line(each.index, line)
            if not data:
                self._loop.unwatch(each.output)
            if rest[each.index] and (not data or len(rest[each.index]) > _LONGEST_LINE):
                on_line(each.index, rest[each.index])
                rest[each.index] = b""
            return bool(data)

        held = False

        def hold() -> None:
            nonlocal held
            if (full() and not self._interrupted) != held:
                held = not held
                for each in self._hosts:
                    if held:
                        self._loop.unwatch(each.output)
                    else:
                        self._loop.watch(each.output, partial(read, each))

        pidfds = []
        for each in self._hosts:
            index, ip = str(each.index), address(each.index)
            words = [w.replace("{index}", index).replace("{ip}", ip) for w in command]
            variables = {**environment, **self._variables(each.index)}
            pidfds.append(os.pidfd_open(each.pid))
            self._loop.watch(each.output, partial(read, each))
            self._loop.watch(pidfds[-1], self._reaper(each, pidfds[-1]))
            each.send(task="run", command=words, environment=variables)

        def handle(signum: int, _: object) -> None:
            if not on_signal(signum):
                self._signum = self._signum or signum
                self._interrupted = f"interrupted by {signal.Signals(signum).name}"

        before = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            deadline = time.monotonic() + limit
            self._until_ended(deadline, hold)
            if not self._interrupted and time.monotonic() > deadline:
                self.overdue = [each.index for each in self._hosts if each.status is None]
            if any(each.status is None for each in self._hosts):
                self._stop(GRACE)
            for each in self._hosts:
                os.set_blocking(each.output, False)
                while self._left(each, read):
                    pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for fd in pidfds:
                self._loop.unwatch(fd)
                os.close(fd)
            for each in self._hosts:
                self._loop.unwatch(each.output)
        if self._signum:
            raise Interrupted(self._signum, "the command was ended on all hosts")
        if self._interrupted:
            raise AdaptraError(f"{self._interrupted}; the command was ended on all hosts")
        return [each.wait() for each in self._hosts]

    @staticmethod
    def _left(each: host.Host, read: Callable[[host.Host], bool]) -> bool:
        try:
            return read(each)
        except BlockingIOError:
            return False

    def _variables(self, index: int) -> dict[str, str]:
        master, world = address(0), str(len(self._hosts))
        return {
            "HOST_INDEX": str(index), "HOST_IP": address(index),
            "GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE,
            "NCCL_IB_DISABLE": "1",  # RDMA goes around our network
            "NCCL_HOSTID": f"netlab-{index}",  # else one machine to NCCL, for memory that is shared
            "RANK": str(index), "WORLD_SIZE": world, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": master, "MASTER_PORT": str(PORT),
            "PET_NNODES": world, "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": master, "PET_MASTER_PORT": str(PORT),
        }  # fmt: skip

    def _reaper(self, each: host.Host, pidfd: int) -> Callable[[], None]:
        def reap() -> None:
            each.wait()
            self._loop.unwatch(pidfd)

        return reap

    def _until_ended(self, deadline: float, hold: Callable[[], None]) -> None:
        """Wait until the command has ended everywhere, or has failed somewhere long enough ago."""
        failed_at = 0.0

        def ended() -> bool:
            nonlocal failed_at
            now = time.monotonic()
            self._shape(now)
            hold()
            if not failed_at and any(h.status for h in self._hosts):
                failed_at = now
            late = now > deadline or (failed_at and now > failed_at + FAILED_GRACE)
            everywhere = all(h.status is not None for h in self._hosts)
            return bool(everywhere or late or self._interrupted)

        self._loop.run(ended, float("inf"))

    def _shape(self, now: float) -> None:
        iteration, until = self._shaped
        if iteration == self.iteration and now < until:
            return
        self._shaped = (self.iteration, now + _RULES_EVERY)
        seconds = now - self._began
        rules: dict[Link, LinkRule] = {}
        for rule in self.rules:
            if rule.active(self.iteration, seconds):
                rules.setdefault((rule.source, rule.target), rule)
        self._network.shape(rules)
        rates: dict[int, float] = {}
        for port in self.ports:
            if port.active(self.iteration, seconds):
                rates.setdefault(port.host, port.rate)
        self._set_rates(rates)

    def _abandoned(self) -> None:
        assert self._parent is not None
        self._loop.unwatch(self._parent)
        self._interrupted = "what started the laboratory has ended (nohup lets it go on)"

    def _stop(self, grace: float) -> None:
        for each in self._hosts:
            each.end(signal.SIGTERM)
        self._loop.run(lambda: all(h.status is not None for h in self._hosts), grace)
        for each in self._hosts:
            each.end(signal.SIGKILL)

    def _end(self) -> None:
        for each in self._hosts:
            each.end(signal.SIGKILL)
        for each in self._hosts:
            each.wait()
            each.close()
        self._hosts = []


def _parent() -> int | None:
    """Return a pidfd of the process that started us; None if we are to outlive it, as by nohup.

    Otherwise a killed script would leave the laboratory to run on, for hours perhaps.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return None
    with contextlib.suppress(OSError):  # outside our process namespace
        return os.pidfd_open(os.getppid())
    return None

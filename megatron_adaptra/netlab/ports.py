"""Hosts whose port has a rate, over all their links: a token bucket at both ends of the port.

The kernel's `tbf` delays packets on the way out alone, so one on the host's own device shapes what
it sends, and one on the hub's device towards it shapes what it receives. What TCP depends on is
set, and read back from a connection.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from pathlib import Path

from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.netlab import netem
from megatron_adaptra.netlab.delay_line import DelayLine
from megatron_adaptra.netlab.namespace import entered
from megatron_adaptra.netlab.netem import Netem, batch, device, port
from megatron_adaptra.netlab.network import INTERFACE, QUEUE, address, subnet

PORT_MTU = 9000  # bytes: larger packets would take turns at a slow port too coarsely
CONGESTION_CONTROL = "cubic"  # bbr sends too little after a pause
# Bytes that TCP hands to a port at once, to be cut into packets there (segmentation offload). Each
# connection may have two of them wait there, and the kernel's 64 KiB would be 3 ms of a port of
# 20 MB/s each: what is urgent would come too late behind those of other connections.
SEGMENTS = 32_000
BURST = 70_000  # bytes that may leave at once; a larger packet never passes
_UNLIMITED = 125e9  # bytes/s
_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
_IP_MTU = 14  # IP_MTU, which Python's socket does not name
_TIMEOUT = 10.0  # seconds to connect two hosts


class Ports(Netem):
    """A bridge that joins hosts whose ports have rates, or a line that delays all that crosses it.

    Args:
        namespaces: of the hosts, a descriptor each, in use until `close`.
        pids: of the hosts, the processes in them.
        delay: seconds from each host to each other one, beside what the machine takes.

    Raises:
        AdaptraError: the kernel, ip or tc refuses something.
    """

    def __init__(self, namespaces: Sequence[int], pids: Sequence[int], delay: float) -> None:
        super().__init__(namespaces, pids, (), PORT_MTU)
        self._namespaces, self._rates = namespaces, [math.inf] * len(namespaces)
        self._line: DelayLine | None = None
        try:
            for host, namespace in enumerate(namespaces):
                with entered(namespace):
                    route = f"dev {INTERFACE} proto kernel scope link src {address(host)}"
                    batch("ip", [f"route replace {subnet()} {route} congctl {CONGESTION_CONTROL}"])
                    batch("ip", [f"link set dev {INTERFACE} gso_max_size {SEGMENTS}"])
                    _IDLE.write_text("0")
                self._bucket("add", host, math.inf)
            if delay:
                names = [port(host) for host in range(len(namespaces))]
                with entered(self.hub):
                    batch("ip", [f"link set dev {name} nomaster" for name in names])
                    self._line = DelayLine(names, delay)
        except (AdaptraError, OSError) as error:
            self.close()
            raise AdaptraError(f"a host's port cannot be set up: {error}") from None

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        super().close()

    def set_rates(self, rates: Sequence[float]) -> None:
        """Let ports pass `rates` from now on, one per host, bytes per second each way; inf: all."""
        for host, rate in enumerate(rates):
            if rate != self._rates[host]:
                self._bucket("change", host, rate)
                self._rates[host] = rate

    def _bucket(self, do: str, host: int, rate: float) -> None:
        with entered(self._namespaces[host]):
            batch("tc", [f"qdisc {do} {_bucket(INTERFACE, rate)}"])
        with entered(self.hub):
            batch("tc", [f"qdisc {do} {_bucket(port(host), rate)}"])

    def tcp(self) -> dict[str, str | int | bool]:
        """Return the settings of a TCP connection from host 0 to host 1, read from one.

        `congestion_control`, `mtu` and `segments` (bytes), `slow_start_after_idle`.
        """
        with entered(self._namespaces[0]):
            segments = int(device(INTERFACE)["gso_max_size"])
        with entered(self._namespaces[1]):
            server = socket.create_server((address(1), 0))
        with server, entered(self._namespaces[0]):
            with socket.create_connection(server.getsockname(), _TIMEOUT) as connection:
                name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                mtu = connection.getsockopt(socket.IPPROTO_IP, _IP_MTU)
            idle = _IDLE.read_text().strip()
        return {
            "congestion_control": name.rstrip(b"\0").decode(),
            "mtu": mtu,
            "segments": segments,
            "slow_start_after_idle": idle != "0",
        }


def probe() -> None:
    """Raise AdaptraError, which says what is missing, unless this kernel can keep rates."""
    netem.probe(False, [f"qdisc add {_bucket(port(0), math.inf)}"])


def _bucket(device: str, rate: float) -> str:
    rate = min(rate, _UNLIMITED)
    limit = min(max(rate * QUEUE, 2 * BURST), 2e9)  # bytes that wait; a field of 32 bits
    burst = max(BURST, min(rate * 1e-4, 1e8))  # more for rates too high for the kernel's clock
    return f"dev {device} root handle 2: tbf rate {rate:.0f}bps burst {burst:.0f} limit {limit:.0f}"

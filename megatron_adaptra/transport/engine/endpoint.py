"""Opens, repairs and closes all paths of one wire from this process to its peers.

A path is a connection that carries messages: through memory, over TCP, or over a rail, an RDMA
port, numbered by its place in each side's list. The higher of two ranks dials: through memory if
both are on one machine, else several paths over TCP. Rails are only for peers with large messages,
since each takes registered memory; TCP then serves where no rail does. A path that fails is
redialled for as long as the job lives, with pauses that grow until one carries data, and starts on
trial, which the engine sees to. A peer is lost after `timeout` seconds in which no path carried
data, even if paths reconnect meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_adaptra.base.errors import AdaptraError, PeerLost
from megatron_adaptra.base.exits import at_exit
from megatron_adaptra.transport.address import fault_here, interface_of
from megatron_adaptra.transport.descriptors import make_room
from megatron_adaptra.transport.engine.bindings import missing_tls, new_engine
from megatron_adaptra.transport.engine.dial import (
    ORDER_SHM,
    ORDER_TCP,
    ORDER_VERBS,
    TRIAL,
    Address,
    answer_shm,
    answer_verbs,
    ask_tcp,
    dial_shm,
    dial_tcp,
    dial_verbs,
)
from megatron_adaptra.transport.engine.events import Events
from megatron_adaptra.transport.engine.handshake import Answering, Identity, Kind, Refused
from megatron_adaptra.transport.engine.listener import Listener
from megatron_adaptra.transport.engine.rails import Rail, rails
from megatron_adaptra.transport.engine.rendezvous import Rendezvous

if TYPE_CHECKING:
    from megatron_adaptra.transport.engine.bindings import Engine

CONNECTIONS = 4  # over TCP to a peer: one alone does not fill a long link
# Bytes. A window is what a long and fast link holds, 80 ms both ways at 13 GB/s; memory is taken
# only for what comes before its receive is posted.
WINDOW, PIECE = 1 << 30, 1 << 20
SILENCE = 5.0  # seconds; both sides of a path send a frame each second
_DIAL = 5.0  # seconds to dial one path
_PAUSE, _LONGEST = 0.05, 5.0  # seconds between two attempts, at first and at most
_LOOK = 0.02  # seconds between two reads of the rendezvous
_GONE = 1.0  # seconds of refusals after which a peer has departed
_DESCRIPTORS = 6  # of a peer: its connections, and what is on its way
_OF_RAIL = 3  # descriptors of one to a peer: its connection, its completions, and a new one
_IDLE = 3600.0  # seconds that the keeper waits where no peer has a deadline


class _Path(NamedTuple):
    """`rail`: its number; None for TCP and memory. `order`: see ORDER_TCP, without TRIAL."""

    rail: int | None
    order: int


@dataclass
class _Peer:
    """`paths`: open ones, by path number.

    `carries`: numbers of paths that have carried data, trials left out. `lost`: numbers of paths
    that failed before `paths` had them.
    """

    rank: int
    address: Address | None = None
    wants_rails: bool = False
    paths: dict[int, _Path] = field(default_factory=dict)
    carries: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    pauses: dict[int | None, float] = field(default_factory=dict)  # seconds to the next dial
    failed: bool = False  # a path to it has failed before
    departed: bool = False  # given up; never redial
    dialling: set[int | None] = field(default_factory=set)  # rails
    silent_since: float | None = None  # monotonic seconds; None while a path carries data
    why: str = ""

    @property
    def rails(self) -> list[int | None]:
        """The rail of every open path, repeats included."""
        return [path.rail for path in self.paths.values()]


class Endpoint:
    """An endpoint keeps the paths from this process to its peers, for all transports of one wire.

    Args:
        me: its rank.
        host: the address to listen at, which the other ranks can reach.
        machine: the same text on all ranks that can share memory.
        rendezvous: the same store for all ranks.
        timeout: seconds for a rank to publish its address, for `connect`, and until a peer without
            a path is lost.
        log: the file to which events are appended as JSON lines.
        fallback: messages may use the network where there are RDMA ports, too; else `connect` opens
            rails.
        encrypted: TLS over the network, which excludes RDMA; the same on all ranks.
        ports: RDMA ports to use, else those of rails().
        gpu: address on the bus of the GPU whose messages these are, to prefer near ports.
        silence: seconds without a frame after which a path has failed.
        connections: to a peer on another machine, the same on all ranks. Messages overtake each
            other on several, and share a port; on one they arrive in the order of their sends.

    Raises:
        AdaptraError: encryption is not possible here.
        PeerLost: no rank published the job's secret in `timeout`.
    """

    engine: Engine
    records: Events  # failed paths and refused connections
    transports: set[object]  # not closed: the engine writes into the memory of their receives

    def __init__(
        self,
        me: int,
        host: str,
        machine: str,
        rendezvous: Rendezvous,
        timeout: float,
        log: Path | None = None,
        *,
        fallback: bool = True,
        encrypted: bool = False,
        ports: Sequence[Rail] | None = None,
        gpu: str = "",
        silence: float = SILENCE,
        connections: int = CONNECTIONS,
    ) -> None:
        if encrypted and (why := missing_tls()):
            raise AdaptraError(f"messages between hosts cannot be encrypted here: {why}")
        self._rendezvous, self._timeout, self._fallback = rendezvous, timeout, fallback
        self._connections = connections
        self._closed = threading.Event()
        self.engine = new_engine(WINDOW, PIECE, silence)
        rendezvous.put_first("secret", secrets.token_hex(32))
        secret = bytes.fromhex(self._wait_for_key("secret", "torch's store"))
        self._me = Identity(me, secret, WINDOW, PIECE, encrypted)
        self._rails = [] if encrypted else rails(gpu, speaks=me == 0) if ports is None else ports
        self.records = Events(me, log)
        self.transports = set()
        self._peers: dict[int, _Peer] = {}
        self._changed = threading.Condition()
        self._dialling: set[threading.Thread] = set()
        self.listener = Listener(self._me, host, self._accepted, self.records.stranger)
        self._interface = interface_of(host)
        self._address = Address(
            host, self.listener.port, self.listener.name, machine, len(self._rails)
        )
        rendezvous.put(f"address/{me}", json.dumps(asdict(self._address)))
        self._keeper = threading.Thread(target=self._keep, name="adaptra-keeper", daemon=True)
        self._keeper.start()
        at_exit(self, Endpoint.close)

    def connect(self, ranks: Collection[int], timeout: float | None = None) -> None:
        """Open a path to each of `ranks`, within `timeout` seconds for all of them together.

        Raises PeerLost, which names the first rank without a path.
        """
        timeout = self._timeout if timeout is None else timeout
        end = time.monotonic() + timeout
        make_room(_DESCRIPTORS * len(ranks))
        for rank in ranks:
            peer = self._peer(rank)
            if not peer.paths:  # else all of them are there, or are being dialled
                self._dial_soon(peer)
        for rank in ranks:
            peer = self._peer(rank)
            with self._changed:
                left = max(0.0, end - time.monotonic())
                if not self._changed.wait_for(lambda: bool(peer.paths), left):  # noqa: B023
                    why = f": {peer.why}" if peer.why else ""
                    raise PeerLost(f"rank {rank} is not there after {timeout:g} s{why}")

    def open_rails(self, rank: int) -> None:
        """Connect with `rank` over RDMA, too, and keep that up; returns at once.

        Messages take the network until a rail is open. `rank`: one of `connect`. The higher rank
        of the two ends has to call this.
        """
        peer = self._peers[rank]
        if peer.wants_rails or not self._rails:
            return
        with self._changed:
            peer.wants_rails = True
            by_memory = any(path.order == ORDER_SHM for path in peer.paths.values())
        if peer.address is not None and not by_memory:  # else `_open_path` does it, if it has to be
            self._dial_rails(peer, peer.address)

    def through(self, rank: int) -> str:
        """Return the ports or the interface here that messages from and to `rank` go through.

        `memory`, RDMA ports such as `mlx5_0:1+mlx5_1:1`, or an interface; empty where there is no
        path.
        """
        with self._changed:
            peer = self._peers.get(rank)
            carry = [] if peer is None else [p for n, p in peer.paths.items() if n in peer.carries]
        order = min((path.order for path in carry), default=ORDER_TCP)
        if order == ORDER_SHM:
            return "memory"
        if order == ORDER_TCP:
            return self._interface if carry else ""
        used = sorted({p.rail for p in carry if p.rail is not None and p.order == order})
        # A port may have several connections.
        return "+".join(dict.fromkeys(str(self._rails[rail]) for rail in used))

    def close(self) -> None:
        """Close everything; what is under way fails, here and there."""
        if not self._closed.is_set():
            self._closed.set()
            self.engine.wake()
            self._keeper.join(_DIAL)
            self.listener.close()
            self.engine.close("this side has closed its endpoint")
            self.transports.clear()
            self.records.close()
            end = time.monotonic() + _DIAL
            for thread in self._dialling:
                thread.join(max(0.0, end - time.monotonic()))

    def _wait_for_key(self, key: str, owner: str) -> str:
        end = time.monotonic() + self._timeout
        while (text := self._rendezvous.get(key)) is None:
            if time.monotonic() > end:
                raise PeerLost(f"waited {self._timeout:g} s for {owner} to say its {key!r}")
            if self._closed.wait(_LOOK):
                raise PeerLost("this side has closed its endpoint")
        return text

    def _peer(self, rank: int) -> _Peer:
        with self._changed:
            if rank not in self._peers:
                self.engine.add_peer(rank, f"rank {rank}")
                self._peers[rank] = _Peer(rank)
            return self._peers[rank]

    # Paths. The higher rank dials them; the lower one asks for them when they are lost.

    def _dial_soon(self, peer: _Peer, rail: int | None = None) -> None:
        with self._changed:
            if peer.rank > self._me.rank:
                rail = None
                if not peer.failed:
                    return
            if rail not in peer.dialling and not self._closed.is_set():
                peer.dialling.add(rail)
                self._start(self._dial, peer, rail)

    def _start(self, work: Callable[..., None], peer: _Peer, *args: Any) -> None:
        name = f"adaptra-dial-{peer.rank}"
        thread = threading.Thread(target=work, args=(peer, *args), name=name, daemon=True)
        # While the interpreter ends it takes no more threads.
        with self._changed, contextlib.suppress(RuntimeError):
            thread.start()
            self._dialling = {t for t in self._dialling if t.is_alive()} | {thread}

    def _dial(self, peer: _Peer, rail: int | None) -> None:
        """Dial until all paths over the `rail` are open, the peer departs, or this side closes."""
        pause, refused = _PAUSE, None
        self._closed.wait(peer.pauses.get(rail, 0.0))
        while not (self._closed.is_set() or peer.departed):
            began = time.monotonic()
            try:
                if peer.address is None:
                    key = f"address/{peer.rank}"
                    words = json.loads(self._wait_for_key(key, f"rank {peer.rank}"))
                    peer.address = Address(**words)
                wanted = self._open_path(peer, peer.address, rail)
                with self._changed:
                    if peer.rails.count(rail) >= wanted:
                        peer.dialling.discard(rail)
                        return
                if not peer.failed:  # no failure yet: dial the next path without a pause
                    continue
                pause = _PAUSE
            except ConnectionRefusedError:  # its listener lives as long as its process
                refused = refused or time.monotonic()
                peer.why = "its connection closed"
                if peer.failed and not peer.paths and time.monotonic() - refused > _GONE:
                    self._give_up(peer, f"rank {peer.rank} is gone: {peer.why}")
            except (OSError, Refused, RuntimeError, AdaptraError) as error:
                refused = None
                peer.why = str(error) or type(error).__name__
                if rail is not None and isinstance(error, RuntimeError):
                    self.records.no_rail(peer.rank, peer.why)
            self._closed.wait(max(0.0, began + pause - time.monotonic()))
            pause = min(2 * pause, _LONGEST)

    def _open_path(self, peer: _Peer, address: Address, rail: int | None) -> int:
        """Open one path over the `rail`, or ask for it; return how many there have to be."""
        call = self.engine, self._me, peer.rank, address, _DIAL
        order = self._order(peer, rail)
        if peer.rank > self._me.rank:
            ask_tcp(self._me, peer.rank, address, _DIAL)
            return 0 if peer.paths else 1
        if rail is not None:
            self._add(peer, dial_verbs(*call, self._rails[rail], rail, order), order, rail)
            return 1
        if address.machine == self._address.machine:
            try:
                self._add(peer, dial_shm(*call), ORDER_SHM)
                return 1
            except ConnectionRefusedError:  # in a network namespace of its own
                pass
        wanted = peer.wants_rails or not self._fallback
        if wanted and self._dial_rails(peer, address) and not self._fallback:
            return 0
        self._add(peer, dial_tcp(*call, order), order)
        return self._connections

    def _dial_rails(self, peer: _Peer, address: Address) -> bool:
        """Dial every rail both sides have. Returns whether there is any."""
        both = range(min(len(self._rails), address.rails)) if peer.rank < self._me.rank else ()
        make_room(_OF_RAIL * len(both))
        for rail in both:
            with self._changed:
                there = rail in peer.rails
            if not there:
                self._dial_soon(peer, rail)
        return bool(both)

    def _order(self, peer: _Peer, rail: int | None = None) -> int:
        """Return the priority of a new path (see ORDER_TCP)."""
        return (ORDER_TCP if rail is None else ORDER_VERBS) + (TRIAL if peer.failed else 0)

    def _accepted(self, answering: Answering, connection: socket.socket) -> None:
        """Serve a `connection` of a peer, on the listener's thread."""
        assert answering.peer is not None
        peer = self._peer(answering.peer)
        if answering.kind is Kind.ASK:
            connection.close()
        elif answering.kind is Kind.SHM:
            self._add(peer, answer_shm(self.engine, peer.rank, connection, _DIAL), ORDER_SHM)
        elif answering.kind is Kind.VERBS:  # whose own handshakes may take seconds
            self._start(self._answer_verbs, peer, connection)
        elif answering.kind is Kind.TLS:
            self._start(self._encrypt, peer, connection, answering.key)
        else:
            order = self._order(peer)
            self._add(peer, self.engine.add_tcp(peer.rank, connection.detach(), order), order)

    def _answer_verbs(self, peer: _Peer, connection: socket.socket) -> None:
        order = self._order(peer, 0)
        try:
            path, rail = answer_verbs(self.engine, peer.rank, connection, _DIAL, self._rails, order)
            self._add(peer, path, order, rail)
        except (OSError, Refused, RuntimeError) as error:  # the dialer tries again
            if isinstance(error, RuntimeError):
                self.records.no_rail(peer.rank, str(error))
            self.records.note("refused", peer.rank, f"no rail: {error}", "here")

    def _encrypt(self, peer: _Peer, connection: socket.socket, key: bytes) -> None:
        order = self._order(peer)
        with contextlib.suppress(RuntimeError):  # then it comes again
            fd = connection.detach()
            path = self.engine.add_tls(peer.rank, fd, order, key, False, _DIAL)
            self._add(peer, path, order)

    def _add(self, peer: _Peer, path: int, order: int, rail: int | None = None) -> None:
        with self._changed:
            if path in peer.lost:  # it failed before it was added
                peer.lost.discard(path)
                return
            far = rail is not None and self._rails[rail].far
            peer.paths[path] = _Path(rail, order % TRIAL + far)
            if order < TRIAL:
                self._carries(peer, path)
            self._changed.notify_all()

    def _carries(self, peer: _Peer, path: int) -> None:
        if peer.silent_since is not None:
            self.records.note("back", peer.rank)
        peer.silent_since = None
        peer.carries.add(path)
        if (known := peer.paths.get(path)) is not None:
            peer.pauses.pop(known.rail, None)

    # The keeper's thread.

    def _keep(self) -> None:
        while not self._closed.is_set():
            now = time.monotonic()
            soonest = min((until for until, _ in self._deadlines()), default=now + _IDLE)
            for rank, path, why in self.engine.events(max(0.0, soonest - now)):
                peer = self._peers[rank]
                if why:
                    self._lose(peer, path, why)
                else:
                    with self._changed:
                        self._carries(peer, path)
            for until, peer in self._deadlines():
                if until <= time.monotonic():
                    peer.silent_since = None
                    why = f"rank {peer.rank} is lost, no way to it for {self._timeout:g} s"
                    self._give_up(peer, f"{why}: {fault_here(self._address.host) or peer.why}")

    def _deadlines(self) -> list[tuple[float, _Peer]]:
        """Return (time, peer) for each peer that no path serves; it is lost at that time."""
        with self._changed:
            peers = self._peers.values()
            return [(p.silent_since + self._timeout, p) for p in peers if p.silent_since]

    def _lose(self, peer: _Peer, path: int, why: str) -> None:
        fault = fault_here(self._address.host)
        why = f"{fault} here" if fault else why
        self.records.note("lost", peer.rank, why, "here" if fault else "there")
        with self._changed:
            known = peer.paths.pop(path, None)
            if known is None:
                peer.lost.add(path)
            peer.carries.discard(path)
            peer.failed, peer.why = True, why
            if not peer.carries and peer.silent_since is None:
                peer.silent_since = time.monotonic()
        rail = None if known is None else known.rail
        peer.pauses[rail] = min(2 * peer.pauses.get(rail, _PAUSE), _LONGEST)
        self._dial_soon(peer, rail)

    def _give_up(self, peer: _Peer, why: str) -> None:
        """Fail all that is under way with the peer, and refuse it if it connects again."""
        if not peer.departed:
            peer.departed = True
            fault = fault_here(self._address.host)
            self.records.note("gone", peer.rank, why, "here" if fault else "there")
            self.engine.fail_peer(peer.rank, why)

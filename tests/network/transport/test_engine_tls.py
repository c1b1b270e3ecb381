"""What crosses the network between two endpoints, encrypted if that is asked for."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from launching import ROOT
from patience import PATIENCE
from transport.ranks import until
from transport.wiretap import Wiretap

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.transport.engine.bindings import missing_tls, new_engine
from megatron_adaptra.transport.engine.endpoint import CONNECTIONS, SILENCE, Endpoint

if TYPE_CHECKING:
    from megatron_adaptra.transport.engine.bindings import Engine

MARK = b"of the weights of a model, that nobody else should see. "
MESSAGE = MARK * 20_000
HANDSHAKE = 1000  # bytes, more than it takes

pytestmark = pytest.mark.skipif(bool(missing_tls()), reason=f"no TLS: {missing_tls()}")

Change = Callable[[int, bytes], bytes]  # of a connection, what crosses it


@contextlib.contextmanager
def pair(folder: Path, change: Change, *encrypted: bool) -> Iterator[list[Endpoint]]:
    rendezvous, ends = Wiretap(folder, lambda number, _, data: change(number, data)), []
    try:
        for rank, yes in enumerate(encrypted):
            end = Endpoint(rank, "127.0.0.1", f"of {rank}", rendezvous, PATIENCE, encrypted=yes)
            ends.append(end)
        yield ends
    finally:
        for end in ends:
            end.close()
        rendezvous.close()


def meet(ends: list[Endpoint]) -> None:
    for rank in (1, 0):
        ends[rank].connect([1 - rank])
    until(lambda: ends[0].engine.counts(1).paths == CONNECTIONS, "all are there")


def exchange(ends: list[Endpoint], times: int = 3) -> None:
    sent = ctypes.create_string_buffer(MESSAGE, len(MESSAGE))
    got = [ctypes.create_string_buffer(len(MESSAGE)) for _ in range(2 * times)]
    works = []
    for number, memory in enumerate(got):
        me, peer = ends[number % 2].engine, ends[1 - number % 2].engine
        works.append(me.receive(1 - number % 2, 5, ctypes.addressof(memory), len(MESSAGE)))
        works.append(peer.send(number % 2, 5, ctypes.addressof(sent), len(MESSAGE)))
    for work in works:
        assert work.wait(PATIENCE)
        assert not work.error(), work.error()
    assert all(memory.raw == MESSAGE for memory in got)


@pytest.mark.parametrize("encrypted", [False, True])
def test_who_listens_in_reads_nothing(encrypted: bool, tmp_path: Path) -> None:
    received = bytearray()

    def listen(_: int, data: bytes) -> bytes:
        received.extend(data)
        return data

    with pair(tmp_path, listen, encrypted, encrypted) as ends:
        meet(ends)
        exchange(ends)
        assert len(received) > 6 * len(MESSAGE)
    assert (MARK in received) != encrypted


def test_who_changes_a_bit_ends_a_path_and_no_message(tmp_path: Path) -> None:
    """It comes again over another connection."""
    seen, changed = dict[int, int](), set[int]()

    def change(number: int, data: bytes) -> bytes:
        seen[number] = seen.get(number, 0) + len(data)
        if seen[number] < 10 * HANDSHAKE or changed:
            return data
        changed.add(number)
        return data[:-1] + bytes([data[-1] ^ 1])

    with pair(tmp_path, change, True, True) as ends:
        meet(ends)
        exchange(ends, 10)
        assert len(changed) == 1
        whys = [event.why for end in ends for event in end.records.last if event.what == "lost"]
        assert "what was encrypted has been changed on its way" in whys


@pytest.mark.parametrize("encrypted", [(True, False), (False, True)])
def test_one_side_alone_does_not_encrypt(encrypted: tuple[bool, bool], tmp_path: Path) -> None:
    with pair(tmp_path, lambda _, data: data, *encrypted) as ends:
        why = "is encrypted here" if encrypted[0] else "is not encrypted here"
        with pytest.raises(PeerLost, match=f"the network {why}"):
            ends[1].connect([0], 1)
        assert ends[0].records.strangers


def tls(engine: Engine, fd: int, key: bytes, first: bool) -> str:
    try:
        engine.add_tls(1, fd, 0, key, first, PATIENCE)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = new_engine(1 << 20, 1 << 16, SILENCE)
    engine.add_peer(1, "rank 1")
    yield engine
    engine.close("the end")


def test_both_need_the_same_key(engine: Engine) -> None:
    with ThreadPoolExecutor(2) as pool:
        for keys, works in (((b"k" * 32, b"k" * 32), True), ((b"k" * 32, b"l" * 32), False)):
            fds = [one.detach() for one in socket.socketpair()]
            both = zip(fds, keys, (True, False), strict=True)
            ends = [pool.submit(tls, engine, *one) for one in both]
            whys = [end.result(PATIENCE) for end in ends]
            assert all(("encryption failed" in why) != works for why in whys), whys


@pytest.mark.parametrize("first", [True, False])
def test_no_certificate_replaces_the_key(first: bool, engine: Engine, tmp_path: Path) -> None:
    """Else an attacker who can change what crosses would speak TLS with each side."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl that makes a certificate")
    made = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -days 1 -subj /CN=x"
    subprocess.run(made.split(), cwd=tmp_path, check=True, capture_output=True, timeout=PATIENCE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if first else ssl.PROTOCOL_TLS_CLIENT)
    if first:
        context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    else:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    mine, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE)

    def meddle() -> None:
        with contextlib.suppress(OSError), context.wrap_socket(theirs, server_side=first):
            pass

    with ThreadPoolExecutor(1) as pool:
        pool.submit(meddle)
        assert "encryption failed" in tls(engine, mine.detach(), b"k" * 32, first)


NEEDS_IT = """
import sys, tempfile
from pathlib import Path
from benchmarks.folder_rendezvous import FolderRendezvous
from megatron_adaptra.transport.engine.endpoint import Endpoint
try:
    Endpoint(0, "127.0.0.1", "one", FolderRendezvous(Path(tempfile.mkdtemp())), 1, encrypted=True)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_the_library_it_is_an_error() -> None:
    maps = Path("/proc/self/maps").read_text().split()
    library = next(word for word in maps if "/libssl.so.3" in word)
    hidden: Any = ["unshare", "--mount", "sh", "-c", 'mount --bind /dev/null "$0" && exec "$@"']
    command = [*hidden, library, sys.executable, "-c", NEEDS_IT]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode:
        pytest.skip(f"the library cannot be hidden here: {done.stderr.strip()}")
    assert done.stdout.startswith("AdaptraError messages between hosts cannot be encrypted here: ")
    assert "libssl.so.3" in done.stdout

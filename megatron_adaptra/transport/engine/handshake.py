"""The handshake of a connection: both ends prove that they know the job's secret.

    hello    dialer:    who it is, whom it wants, its limits, a fresh nonce
    answer   listener:  a fresh nonce and its proof, or why not
    proof    dialer:    its own
    answer   listener:  its last proof, or why not

A proof is HMAC-SHA256 with the secret over all that was sent before, both nonces among it: a
recorded handshake is worth nothing for another connection. Layouts: docs/wire-protocol.md.
It also gives both a key that no other connection has, for encryption of what follows, if it is
asked for. Nothing here does any I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum

VERSION = 1
_MAGIC = b"adaptra\n"
_HELLO = struct.Struct("<8sHBxIIQQ16s32s")  # magic, version, kind, from, to, limits, job, nonce
_ANSWER = struct.Struct("<B63s32s32s")  # refused, why, nonce, proof
HELLO, ANSWER, PROOF = _HELLO.size, _ANSWER.size, 32
_NONE = bytes(32)
_RANKS = 2**31  # at most, for the engine


class Kind(IntEnum):
    """A kind names the purpose of a connection."""

    TCP = 1
    SHM = 2
    ASK = 3  # to find out whether the rank is there, and close
    VERBS = 4  # to find each other's RDMA ports
    TLS = 5  # as TCP, with TLS after the handshake


class Refused(Exception):
    """A Refused reports that the other end is no peer, or refuses this one; its text says why."""


@dataclass(frozen=True)
class Identity:
    """This rank of a job. `secret`: the job's. `window`, `piece`: bytes, alike on all ranks.

    `encrypted`: whether bytes on the network are encrypted, also alike.
    """

    rank: int
    secret: bytes
    window: int
    piece: int
    encrypted: bool = False

    @property
    def job(self) -> bytes:
        """An identifier of the job that does not give the secret away."""
        return hashlib.sha256(b"adaptra job" + self.secret).digest()[:16]

    def proof(self, end: bytes, *sent: bytes) -> bytes:
        """Return the proof that `end` ("dialer", ...) knows the secret, over all bytes `sent`."""
        return hmac.digest(self.secret, b"".join((end, *sent)), "sha256")


class Dialing:
    """The end that calls `peer`: send `hello`, then what `prove` returns for the first answer."""

    def __init__(self, me: Identity, peer: int, kind: Kind) -> None:
        self._me, self._peer = me, peer
        nonce = secrets.token_bytes(32)
        limits = me.window, me.piece
        self.hello = _HELLO.pack(_MAGIC, VERSION, kind, me.rank, peer, *limits, me.job, nonce)
        self._sent = self.hello

    def prove(self, answer: bytes) -> bytes:
        """The proof to send after `answer`, the first one of two. Raises Refused."""
        self._check(answer, b"listener")
        proof = self._me.proof(b"dialer", self._sent)
        self._sent += proof
        return proof

    def end(self, answer: bytes) -> None:
        """The second `answer`; raises Refused unless this is the peer, and takes the connection."""
        self._check(answer, b"welcome")

    @property
    def key(self) -> bytes:
        """The key of this connection after the handshake: both ends have it, and nobody else."""
        return self._me.proof(b"key", self._sent)

    def _check(self, answer: bytes, end: bytes) -> None:
        refused, why, nonce, proof = _ANSWER.unpack(answer)
        if refused:
            words = why.rstrip(b"\0").decode(errors="replace")
            raise Refused("".join(c if c.isprintable() else "?" for c in words))
        self._sent += nonce
        if not hmac.compare_digest(proof, self._me.proof(end, self._sent)):
            raise Refused(
                f"the process that answers for rank {self._peer} does not know the job's secret"
            )


class Answering:
    """The end that is called: `receive` takes `needs` bytes at a time, until `peer` is set.

    `peer`: its rank, once it has proved it; `kind`: of the connection.
    """

    def __init__(self, me: Identity) -> None:
        self._me, self._sent = me, b""
        self.needs = HELLO
        self.peer: int | None = None
        self.kind = Kind.TCP

    def receive(self, message: bytes) -> bytes:
        """Return the answer to the dialer's `message`. Raises Refused; then send it a `refusal`."""
        if not self._sent:
            return self._first(message)
        if not hmac.compare_digest(message, self._me.proof(b"dialer", self._sent)):
            raise Refused("a wrong proof")
        self.peer = self._caller
        return self._answer(b"welcome", message + _NONE, _NONE)

    @property
    def key(self) -> bytes:
        """The key of this connection, which the other end has, too."""
        return self._me.proof(b"key", self._sent)

    def _first(self, hello: bytes) -> bytes:
        magic, version, kind, caller, wanted, window, piece, job, _ = _HELLO.unpack(hello)
        me = self._me
        if magic != _MAGIC:
            raise Refused("no hello")
        if version != VERSION:
            raise Refused(f"version {version} of the wire, here it is {VERSION}")
        if job != me.job:
            raise Refused("another job")
        if wanted != me.rank or caller == me.rank or caller >= _RANKS:
            raise Refused(f"rank {caller} calls {wanted}, this is {me.rank}")
        if (window, piece) != (me.window, me.piece):
            raise Refused(f"limits {window} and {piece}, here {me.window} and {me.piece}")
        try:
            self.kind = Kind(kind)
        except ValueError:
            raise Refused(f"a connection of kind {kind}") from None
        if self.kind in (Kind.TCP, Kind.TLS) and (self.kind is Kind.TLS) != me.encrypted:
            raise Refused(f"the network is {'' if me.encrypted else 'not '}encrypted here")
        self._caller, self.needs = caller, PROOF
        nonce = secrets.token_bytes(32)
        return self._answer(b"listener", hello + nonce, nonce)

    def _answer(self, end: bytes, more: bytes, nonce: bytes) -> bytes:
        self._sent += more
        return _ANSWER.pack(0, b"", nonce, self._me.proof(end, self._sent))


def refusal(why: str) -> bytes:
    """The answer that refuses a dialer because of `why`; without a proof."""
    return _ANSWER.pack(1, why.encode()[:63], _NONE, _NONE)

"""A rank that is none of ours: docs/wire-protocol.md over RDMA, from its other end, with pyverbs.

Nothing of the engine is imported. Errors are the other side's: this one checks nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import sys
import time
from collections import deque
from typing import Any

sys.path.append("/usr/lib/python3/dist-packages")  # Debian's, of the same Python

from pyverbs import enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

HELLO = struct.Struct("<8sHBBIIQQ16s32s")
ANSWER = struct.Struct("<B63s32s32s")
CARD = struct.Struct("<16s80sQIIIIHBB")
OUTCOME = struct.Struct("<B63s")
FRAME = struct.Struct("<HBBIQQQQQQQ")
MAGIC, VERSION, KIND = 0xADA1, 1, 4
DATA, HAVE, ALIVE, MORE = 1, 4, 5, 10
WINDOW, PIECE = 1 << 30, 1 << 20
LONGEST = min(PIECE, 131072)
SLOT = 1024 + LONGEST
SLOTS, EXTRA = 16, 8
FRAMES, WANTS = 1 << 31, 1 << 30
SECONDS = 60.0


def frame(kind: int, number: int, payload: bytes = b"", **fields: int) -> bytes:
    f = {"magic": MAGIC, "flags": 1, "before": 0, "total": 0, "offset": 0, "tag": 0, "taken": 0}
    f.update(fields)
    head = FRAME.pack(
        f["magic"], kind, f["flags"], len(payload), number, f["before"], f["total"], f["offset"],
        f["tag"], time.monotonic_ns(), f["taken"],
    )  # fmt: skip
    return head + payload


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = connection.recv(count - len(data))
        assert got, f"it hung up after {data!r}"
        data += got
    return data


class Stranger:
    """Rank `me`, connected to `peer` over rail 0, where it has `device`."""

    def __init__(self, rendezvous: Any, me: int, peer: int, device: str) -> None:
        self.secret = bytes.fromhex(self._word(rendezvous, "secret"))
        where = json.loads(self._word(rendezvous, f"address/{peer}"))
        self.connection = socket.create_connection((where["host"], where["port"]), SECONDS)
        self._shake(me, peer)
        self._open(device)
        self.connection.sendall(struct.pack("<I", 0) + self._card())
        self._agreed()
        self._connect(CARD.unpack(exactly(self.connection, CARD.size)))
        self.connection.sendall(OUTCOME.pack(0, b""))
        self._agreed()
        self.free = 0
        self.arrived: list[tuple[Any, ...]] = []

    @staticmethod
    def _word(rendezvous: Any, key: str) -> str:
        end = time.monotonic() + SECONDS
        while (text := rendezvous.get(key)) is None:
            assert time.monotonic() < end, key
            time.sleep(0.01)
        return str(text)

    def _proof(self, word: bytes, *sent: bytes) -> bytes:
        return hmac.new(self.secret, word + b"".join(sent), hashlib.sha256).digest()

    def _shake(self, me: int, peer: int) -> None:
        job = hashlib.sha256(b"adaptra job" + self.secret).digest()[:16]
        hello = HELLO.pack(
            b"adaptra\n", VERSION, KIND, 0, me, peer, WINDOW, PIECE, job, os.urandom(32)
        )
        self.connection.sendall(hello)
        refused, why, nonce, proof = ANSWER.unpack(exactly(self.connection, ANSWER.size))
        assert not refused, why
        assert proof == self._proof(b"listener", hello, nonce)
        mine = self._proof(b"dialer", hello, nonce)
        self.connection.sendall(mine)
        refused, why, none, proof = ANSWER.unpack(exactly(self.connection, ANSWER.size))
        assert not refused, why
        assert proof == self._proof(b"welcome", hello, nonce, mine, none)

    def _open(self, device: str) -> None:
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 256)
        rights = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.slots = MR(self.pd, SLOTS * SLOT, rights)
        self.out = MR(self.pd, 2 * SLOT, e.IBV_ACCESS_LOCAL_WRITE)
        cap = QPCap(max_send_wr=16, max_recv_wr=SLOTS + EXTRA, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap)
        self.attributes = QPAttr(port_num=1)
        self.attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        self.qp = QP(self.pd, init, self.attributes)
        for _ in range(SLOTS + EXTRA):
            self._post()

    def _post(self) -> None:
        """A receive, which pyverbs wants to have memory: nothing is written there."""
        self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.out.buf, 0, self.out.lkey)]))

    def _card(self) -> bytes:
        gid = bytes.fromhex(self.context.query_gid(1, 1).gid.replace(":", ""))
        self.mtu = self.context.query_port(1).active_mtu
        return CARD.pack(
            gid,  # of IPv4, for version 2 of RoCE
            bytes(80),
            self.slots.buf,
            self.slots.rkey,
            self.qp.qp_num,
            99,
            SLOTS,
            0,
            self.mtu,
            0,
        )

    def _connect(self, card: tuple[Any, ...]) -> None:
        gid, _, self.there, self.key, number, psn, granted, _, mtu, _ = card
        self.free_there = deque[tuple[int, int, int]]()  # a slot's number, address and key
        self.used_there = deque[tuple[int, int, int]]()
        self._use(self.there, self.key, granted)
        text = ":".join(gid[n : n + 2].hex() for n in range(0, 16, 2))
        route = GlobalRoute(dgid=GID(text), sgid_index=1, hop_limit=64)
        a = self.attributes
        a.dest_qp_num, a.rq_psn, a.path_mtu = number, psn, min(mtu, self.mtu)
        a.max_dest_rd_atomic, a.min_rnr_timer = 0, 12
        a.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self.qp.to_rtr(a)
        a.sq_psn, a.timeout, a.retry_cnt, a.rnr_retry, a.max_rd_atomic = 99, 16, 6, 6, 0
        self.qp.to_rts(a)

    def _use(self, address: int, key: int, count: int) -> None:
        known = len(self.free_there) + len(self.used_there)
        self.free_there += [(known + n, address + n * SLOT, key) for n in range(count)]

    @property
    def granted(self) -> int:
        return len(self.free_there)

    def _agreed(self) -> None:
        refused, why = OUTCOME.unpack(exactly(self.connection, OUTCOME.size))
        assert not refused, why

    def write(self, *frames: bytes, wants: bool = False) -> None:
        """One write into the next slot; gives back what is free, and asks for more or not."""
        data = b"".join(frames)
        self.out.write(data, len(data))
        word, address, key = self.free | WANTS * wants, self.there, self.key
        if data:
            self.used_there.append(self.free_there.popleft())
            number, address, key = self.used_there[-1]
            word |= FRAMES | number << 16
        wr = SendWR(
            num_sge=1, sg=[SGE(self.out.buf, len(data), self.out.lkey)],
            opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM, send_flags=e.IBV_SEND_SIGNALED,
            imm_data=socket.htonl(word),
        )  # fmt: skip
        self.free = 0
        wr.set_wr_rdma(key, address)
        self.written = False
        self.qp.post_send(wr)
        end = time.monotonic() + SECONDS
        while not self.written:  # `out` is written again
            assert time.monotonic() < end
            self.poll()

    def poll(self) -> None:
        count, completions = self.cq.poll(16)
        for wc in completions[:count]:
            assert wc.status == e.IBV_WC_SUCCESS, wc.status
            if not wc.opcode & e.IBV_WC_RECV:
                self.written = True
                continue
            self._post()
            word = socket.ntohl(wc.imm_data)
            for _ in range(word & 0xFFFF):
                self.free_there.append(self.used_there.popleft())
            if not word & FRAMES:
                continue
            data = self.slots.read(wc.byte_len, (word >> 16 & 0xFFF) * SLOT)
            self.free += 1
            while data:
                fields = FRAME.unpack(data[: FRAME.size])
                length = fields[3]
                self.arrived.append((*fields, data[FRAME.size : FRAME.size + length]))
                data = data[FRAME.size + length :]
        if not count:
            time.sleep(0.001)

    def until(self, condition: Any, what: str) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, what
            self.poll()
            if self.free >= SLOTS // 4:
                self.write()

    def more(self) -> int:
        """How many slots were granted by frames; they are used from now on."""
        found = [one for one in self.arrived if one[1] == MORE]
        for one in found:
            self._use(one[7], one[8], one[6])
            self.arrived.remove(one)
        return sum(one[6] for one in found)

    def haves(self, number: int) -> int:
        return sum(one[1] == HAVE and one[4] <= number < one[4] + one[6] for one in self.arrived)

    def message(self, tag: int) -> bytes | None:
        """All of the message of this tag, once it is here."""
        pieces = [one for one in self.arrived if one[1] == DATA and one[8] == tag]
        if not pieces or sum(one[3] for one in pieces) < pieces[0][6]:
            return None
        return b"".join(one[-1] for one in sorted(pieces, key=lambda one: one[7]))

"""The project's own wire between hosts: an endpoint per use (transport/opened.py) has its messages.

`handshake` proves that both ends belong to the job; `listener` answers those who come, `dial` calls
others; `endpoint` keeps paths to peers alive, and `transport` is what the rest of the package sees.
Bytes are moved by the C++ engine (csrc/rdma_offload). docs/wire-protocol.md describes the wire.
"""

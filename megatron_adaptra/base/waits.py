"""The seconds that anything beside the training waits: in one place, so that tests scale them.

Read as `waits.CONNECT` at the moment of the wait, never imported by name.
"""

from __future__ import annotations

HEARTBEAT = 15.0  # between two frames: firewalls drop connections that are idle for a minute
QUIET = 120.0  # of silence, until that is logged
POLL = 1.0  # until a thread that waits for messages looks whether it shall end
CLOSE = 10.0  # for the other side's last message, and for a thread to end
STORE = 2.0  # for one request to torch's key-value store, which may have died
CHAIN = 5.0  # for ranks that wait for each other to say so, when one of them gives up
LOOK_UP = 0.1  # between two looks for something in the store, at first
CONNECT = 600.0  # for a rank to open its end of a connection: ranks start at different moments
START = 120.0  # for what is prepared beside the training when a run starts
REHEARSAL = 30.0  # for messages that only try the way, once the iteration is over
CROSS = 20.0  # for the other end of a connection between replicas, which a plan asks for
SEARCH = 60.0  # for a process that plans beside a training
WORK = 600.0  # for one piece of work beside the training: plans of large jobs take a while
END = 30.0  # for what runs beside the training when a run ends
FOREVER = 7 * 86400.0  # what gloo is given where the deadline is ours, or there is none

"""Layer 3: streams, events, pinned memory and copies of a GPU; the one package that asks for them.

No GPU work that is put on a stream here waits for anything but events that are recorded already:
whatever else the GPU is asked to do, device-wide synchronisation included, never waits for a peer.
"""

"""Ranks as processes, each with a driver, a device and an engine of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist
from apart import apart
from hostile_cuda.batches import TIMEOUT, prepare
from hostile_cuda.jobs import Job

_Pair = tuple[list[int], list[int]]  # weights, and their gradients' sum

_Ended = tuple[dict[int, _Pair], list[str], list[_Pair]]


def run_processes(job: Job) -> list[str]:
    """The faults of a job."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with ThreadPoolExecutor(job.stages) as pool:
        futures = [pool.submit(apart, _rank, job, me, store.port) for me in range(job.stages)]
        ended = [future.result() for future in futures]
    faults = [fault for _, wrong, _ in ended for fault in wrong]
    got = {p: words for words, _, _ in ended for p, words in words.items()}
    wanted = ended[0][2]
    wrong = [p for p in range(len(wanted)) if got.get(p) != wanted[p]]
    return faults + [f"results of position {p} are not the reference's" for p in wrong]


def _rank(job: Job, me: int, port: int) -> _Ended:
    """In a process of its own: its results, its faults, and the reference's results."""
    prepare()
    import torch
    from fakes.hostile_cuda.driver import Driver
    from hostile_cuda.ranks import Plant, Result, train
    from hostile_cuda.stage_model import reference

    from megatron_adaptra.device.cuda import cuda_device
    from megatron_adaptra.transport.engine.endpoint import Endpoint
    from megatron_adaptra.transport.engine.engine_wire import StoreRendezvous

    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=TIMEOUT))
    result = Result()
    with Driver(job.stages, job.queues, job.seed) as driver, driver.as_torch_cuda():
        driver.enter(me, f"rank {me}")
        machine = f"machine {me // 2}"
        rendezvous = StoreRendezvous("engine", lambda: store)
        endpoint = Endpoint(me, "127.0.0.1", machine, rendezvous, TIMEOUT, ports=())
        try:
            train(driver, endpoint, job, me, TIMEOUT, Plant.NOTHING, result, together=False)
            store.set(f"done {me}", "")
            store.wait([f"done {peer}" for peer in range(job.stages)])
        finally:
            endpoint.close()
            cuda_device(torch.device("cuda", me)).close()
        left = [f"rank {me} has left {what}" for what in [driver.left(me)] if what]
        faults = [*driver.findings, *result.faults, *left]
    positions = job.stages * job.chunks
    return result.words, faults, reference(positions, job.microbatches, job.iterations, job.words)

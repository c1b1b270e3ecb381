"""NCCL between ranks that share a GPU: what it takes, and the ways that are tried in turn.

NCCL refuses two ranks on one GPU if they have one host hash; NCCL_HOSTID replaces the hash, so that
each rank looks like a host of its own, and its messages go over NCCL's network transport: here over
a plugin of ours, whose links can be slow (fakes/slow_net). Read in NCCL 2.28.9 to 2.30.7.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fakes.slow_net.network import SlowNetwork

# Messages of one GPU's ranks take the network and nothing else; spinning kernels take few cores.
ALWAYS = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0",
    "NCCL_PXN_DISABLE": "1", "NCCL_RAS_ENABLE": "0", "NCCL_MAX_CTAS": "2",
    "NCCL_MAX_NCHANNELS": "2",
}  # fmt: skip
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_SECONDS = 10.0  # for the daemon to start, and to end


@dataclass(frozen=True)
class Way:
    """A way has NCCL connect ranks that share a GPU.

    `variables`: beside ALWAYS. `slow`: it goes over our plugin, whose links can be slow. `mps`: the
    ranks share a private MPS server. `since`: the first release of NCCL that has it.
    """

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    slow: bool = True
    mps: bool = False
    since: tuple[int, ...] = ()


_PLAIN = {"NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}
WAYS = (
    Way("over our network plugin"),
    Way("over our network plugin, without cuMem", _PLAIN),
    Way("over NCCL's own sockets", {**_PLAIN, "NCCL_NET": "Socket"}, slow=False),
    Way("over our network plugin, under MPS", {**_PLAIN, "NCCL_MAX_CTAS": "1"}, mps=True),
    Way("by NCCL_MULTI_RANK_GPU_ENABLE", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, since=(2, 30)),
)


def host_of(rank: int) -> str:
    """Return the name of the host that NCCL takes a rank's process for."""
    return f"adaptra-{rank}"


@dataclass(frozen=True)
class Network:
    """A network connects ranks over a way; `folder` has its links and what has passed."""

    way: Way
    folder: Path
    variables: Mapping[str, str]

    @classmethod
    def of(cls, way: Way, folder: Path, ranks: int, credit_first: bool = False) -> Network:
        """Make the network of so many `ranks`; with healthy links, in a new `folder`."""
        folder.mkdir(parents=True)
        variables = {**ALWAYS, **way.variables}
        if way.slow:
            network = SlowNetwork(folder, [host_of(rank) for rank in range(ranks)])
            network.credit_first(credit_first)
            variables |= network.environment(host_of(0))
            del variables["NCCL_HOSTID"]  # each rank sets its own: `join`
        return cls(way, folder, variables)


def join(rank: int) -> None:
    """Make this process a host of its own. Call it before NCCL's first communicator."""
    os.environ["NCCL_HOSTID"] = host_of(rank)


def why_not(way: Way, version: str) -> str:
    """Return why a way cannot be tried with this `version` of NCCL, or an empty string."""
    if way.since and tuple(map(int, version.split("."))) < way.since:
        return f"NCCL {version} is older than {'.'.join(map(str, way.since))}"
    if way.mps and shutil.which(MPS_CONTROL) is None:
        return f"there is no {MPS_CONTROL}"
    return ""


@contextlib.contextmanager
def served(way: Way) -> Iterator[Mapping[str, str]]:
    """Start a private MPS server where a way needs one; give the variables of its clients."""
    if not way.mps:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="adaptra-mps-") as folder:
        found = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **found}
        subprocess.run([MPS_CONTROL, "-d"], env=environment, check=True, timeout=MPS_SECONDS)
        try:
            yield found
        finally:
            subprocess.run([MPS_CONTROL], input="quit\n", text=True, env=environment,
                           check=False, timeout=MPS_SECONDS)  # fmt: skip

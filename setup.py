"""Metadata is in pyproject.toml. Here is the C++ engine, without which the package works, too."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

CSRC = Path("csrc") / "rdma_offload"
ParallelCompile().install()

setup(
    ext_modules=[
        Pybind11Extension(
            "megatron_adaptra.transport.engine._native",
            sorted(map(str, CSRC.rglob("*.cpp"))),
            depends=sorted(map(str, CSRC.rglob("*.h"))),
            include_dirs=[str(CSRC)],
            cxx_std=17,
            optional=True,  # no compiler: messages go over gloo
        )
    ]
)

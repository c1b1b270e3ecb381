"""The commands of a page of Markdown, and a clone in which a test runs them as a new user would."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

from check_docs import tracked
from launching import ROOT, clean_env
from megatron_lm_rows import FLAGS

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ENGINE = "megatron_adaptra/transport/engine"
SMALL = Path(__file__).parents[2] / "train" / "ranks" / "pretrain_gpt_small.py"
CLONED = "https://github.com/NVIDIA/Megatron-LM"
STEPS = "--iterations 9 --seq-length 8 --microbatches 4 --stages 2"  # of the demo
# Builds compile the same sources each time; this is what ccache does.
COMPILER = """\
#!{python}
import os, shutil, subprocess, sys

words = sys.argv[1:]
target = words[words.index("-o") + 1]
source = next((word for word in words if word.endswith(".cpp")), "linked.cpp")
kept = os.path.join({folder!r}, os.path.basename(source) + ".o")
if not os.path.exists(kept):
    status = subprocess.call(["g++", *words, "-O0"])
    if status:
        sys.exit(status)
    shutil.copy(target, kept)
shutil.copy(kept, target)
"""


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    return FENCE.findall(text)


def commands(text: str) -> list[str]:
    """The lines of the page's blocks of bash, without comments."""
    found = []
    for language, content in blocks(text):
        if language == "bash":
            lines = content.replace("\\\n", " ").splitlines()
            found += [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [line for line in found if line]


class Clone(NamedTuple):
    """`folder`: the repository, with an environment `.venv` in it; `home`: the user's."""

    folder: Path
    home: Path
    more: dict[str, str]

    def run(self, command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """`command` in a shell, in the clone's folder or `cwd`; too late, all its processes end."""
        ours = re.compile("ADAPTRA_|PYTHONPATH$|VIRTUAL_ENV$")
        kept = {key: value for key, value in clean_env().items() if not ours.match(key)}
        path = f"{self.folder}/.venv/bin:{os.environ['PATH']}"
        return subprocess.run(
            ["timeout", "--kill-after=30", "480", "bash", "-c", command],
            cwd=cwd or self.folder, env={**kept, "PATH": path, **self.more},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=550,
        )  # fmt: skip


def make_clone(root: Path) -> Clone:
    """A copy of what git would clone, in `root`, beside a home with texts and a Megatron-LM.

    Its environment has the packages of this one, and nothing is fetched.
    """
    clone, home = root / "megatron-adaptra", root / "home"
    for path in tracked(ROOT):
        target = clone / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for engine in (ROOT / ENGINE).glob("_native*"):
        shutil.copy(engine, clone / ENGINE)
    _environment(clone)
    (home / "my").mkdir(parents=True)
    shutil.copytree(clone / "docs", home / "my" / "texts")
    checkout = home / "Megatron-LM"
    _checkout(checkout)
    upstream = root / "upstream"
    shutil.copytree(checkout, upstream, symlinks=True)
    compiler = root / "compiler"
    compiler.write_text(COMPILER.format(python=sys.executable, folder=str(root)))
    compiler.chmod(0o755)
    _objects(root)
    more = {
        "HOME": str(home), "CXX": str(compiler), "CC": str(compiler),
        # Off, by this option's name: what the build needs is here.
        "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{upstream}.insteadOf", "GIT_CONFIG_VALUE_0": CLONED,
        "ADAPTRA_PATCHES": str(root / "patches"),
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    made = Clone(clone, home, more)
    git = "git -c user.name=t -c user.email=t@example.org"
    for command in (
        f"git init -qb core_v0.16.1 {upstream}",
        f"cd {upstream} && git add . && {git} commit -qm 'as released'",
        f"python scripts/make_patches.py {checkout} --out {root}/patches",
    ):
        done = made.run(command)
        assert done.returncode == 0, done.stderr
    return made


def _objects(folder: Path) -> None:
    """Give COMPILER the engine's objects of this tree for this Python, if none is out of date."""
    sources = [path for path in (ROOT / "csrc" / "rdma_offload").rglob("*") if path.is_file()]
    newest = max(path.stat().st_mtime for path in sources)
    built = (ROOT / "build").glob(f"temp.*-{sys.implementation.cache_tag}/csrc/**/*.o")
    for path in built:
        if path.stat().st_mtime > newest:
            shutil.copy(path, folder / f"{path.stem}.cpp.o")


def _environment(clone: Path) -> None:
    """`.venv`, as if `pip install --editable .` had been run there; its commands are pip's own."""
    builder = venv.EnvBuilder(symlinks=True)
    builder.create(clone / ".venv")
    python = Path(builder.ensure_directories(clone / ".venv").env_exe)
    (site,) = (clone / ".venv" / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "others.pth").write_text("\n".join([str(clone), *others]))
    for name, module in {
        "adaptra": "megatron_adaptra.cli.main",
        "torchrun": "torch.distributed.run",
        "pip": "pip._internal.cli.main",
    }.items():
        script = python.with_name(name)
        script.write_text(f"#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        script.chmod(0o755)


def _checkout(folder: Path) -> None:
    """As of Megatron-LM: the installed one's package, and a small program that trains with it."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    folder.mkdir()
    shutil.copy(SMALL, folder / "pretrain_gpt.py")
    shutil.copy(SMALL.parents[2] / "support" / "one_gloo_device.py", folder)
    (folder / "megatron").mkdir()
    for place in spec.submodule_search_locations or ():
        for part in Path(place).iterdir():
            (folder / "megatron" / part.name).symlink_to(part)


def filled(command: str) -> str:
    """Placeholders filled in, for two ranks, and the fewest steps that the command allows."""
    flags = [*FLAGS, "--num-layers", "4", "--global-batch-size", "4", "--train-iters", "3"]
    stages = 4 if "netlab" in command else 2
    flags += ["--pipeline-model-parallel-size", str(stages)]
    command = command.replace("<your flags>", " ".join(flags))
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 2")
    for pattern, more in (
        (r"scripts/quickstart\.sh", STEPS),
        (r"adaptra bench p2p", "-e 64K --rounds 2"),
        (r"reproduce\.py", "--name single-7B-2_3-30ms"),
        (r"pretrain_gpt\.sh --smoke", "--gpus-per-node 2 -- --train-iters 3"),
    ):
        if re.search(pattern, command):
            return f"{command} {more}"
    return command

"""Our two statements in pretrain_gpt.py: the place, in and out again, and what is refused."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
REAL = [Path(p) for p in os.environ.get("ADAPTRA_MEGATRON_LM", "").split(":") if p]
OURS = [
    "import megatron_adaptra  # registers the --adaptra flags, see its docs/megatron.md",
    "",
    "megatron_adaptra.register()",
    "",
]
SOURCE = '''"""Trains a model."""
import os

import torch

print("training")
'''
# Where the machine's own settings of git cannot interfere.
ENV = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "ADAPTRA_"))},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}

RUN = {"capture_output": True, "text": True, "timeout": 60}


def git(folder, *words):
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "advice.detachedHead=0"]
    done = subprocess.run(["git", "-C", folder, *who, *words], **RUN, env=ENV, check=True)
    return done.stdout


def script(name, *words, expect=0, cwd=None, **env):
    """What it says on stdout, or the one line on stderr where it is expected to fail."""
    start = [sys.executable] if name.endswith(".py") else []
    done = subprocess.run(
        [*start, ROOT / "scripts" / name, *words],
        **RUN,
        cwd=cwd,
        env={**ENV, **{k: str(v) for k, v in env.items()}},
    )
    assert done.returncode == expect, done.stdout + done.stderr
    if not expect:
        assert done.stderr == ""
        return done.stdout
    (line,) = done.stderr.splitlines()
    assert done.stdout == ""
    assert line.startswith(name.split(".")[0] + ": error: ")
    return line


def unpack(folder, source=SOURCE, version=(0, 16, 1)):
    """The parts of a Megatron-LM checkout that count here."""
    (folder / "megatron/core").mkdir(parents=True)
    (folder / "pretrain_gpt.py").write_bytes(source.encode())
    numbers = zip(("MAJOR", "MINOR", "PATCH", "PRE_RELEASE"), (*version, "''"), strict=True)
    (folder / "megatron/core/package_info.py").write_text(
        "".join(f"{name} = {value}\n" for name, value in numbers)
    )
    return folder


def commit(folder):
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "as released")
    return folder


@pytest.fixture
def checkout(tmp_path):
    return commit(unpack(tmp_path / "m"))


@pytest.fixture
def made(tmp_path, checkout):
    """A folder with the patch for `checkout`, as the variable that names it."""
    script("make_patches.py", checkout, "--out", tmp_path / "made")
    return {"ADAPTRA_PATCHES": tmp_path / "made"}


def goes_in_and_out(folder, **env):
    """Applied, applied again, taken out, taken out again; --check in between."""
    path = folder / "pretrain_gpt.py"
    before, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    assert script("apply_patches.sh", folder, "--check", **env) == "not patched, the patch fits\n"
    assert script("apply_patches.sh", folder, **env).startswith("patched: ")
    after = path.read_bytes()
    text = after.decode().replace("\r\n", "\n")
    assert text.replace("\n".join([*OURS, ""]), "", 1) == before.decode().replace("\r\n", "\n")
    assert script("apply_patches.sh", folder, "--check", **env) == "patched\n"
    assert script("apply_patches.sh", folder, **env).startswith("already patched, nothing to do")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (after, mode)
    assert script("apply_patches.sh", folder, "--revert", **env).startswith("taken out: ")
    assert script("apply_patches.sh", folder, "--revert", **env).startswith("not patched, nothing")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (before, mode)
    assert not list(folder.glob(".adaptra*"))
    return after


PLACES = {
    "first line": "<here>\nimport torch\n",
    "docstring": '# (c)\n\n"""Trains.\n\nimport nothing\n"""\n\n# why\n<here>\nimport x\n',
    "future": "from __future__ import annotations\n\n<here>\nfrom torch import nn\nimport os\n",
    "standard library": "import os, sys\nfrom json import dump\n<here>\nfrom a import b\n",
    "code between": "import time\nSTART = time.time()\nimport json\n\n<here>\nimport megatron\n",
    "comment between": "import os\n\n# heavy\n<here>\nimport megatron.core as m, json  # noqa\n",
    "try": "import os\n<here>\ntry:\n    import torch\nexcept ImportError:\n    torch = None\n",
    "try with json": "try:\n    import json\nexcept ImportError:\n    pass\n<here>\nimport torch\n",
    "if": "import os\n<here>\nif os.name:\n    from torch import nn\nimport numpy\n",
    "function body runs later": "import os\ndef f():\n    import torch\n\n<here>\nimport torch\n",
    "relative": "import os\n<here>\nfrom .x import y\n",
    "shared line": "import os\n<here>\nimport sys; import torch\n",
    "shared with a string": "import os\n<here>\nx = '''\n'''; import torch\n",
    "no newline at the end": "import os\n<here>\nimport torch",
    "not in ASCII": '"""Müller"""\n<here>\nimport torch  # schön\n',
}


@pytest.mark.parametrize("text", PLACES.values(), ids=PLACES)
def test_place(tmp_path, text):
    folder = commit(unpack(tmp_path / "m", text.replace("<here>\n", "")))
    script("make_patches.py", folder, "--out", tmp_path / "made")
    made = {"ADAPTRA_PATCHES": tmp_path / "made"}
    script("apply_patches.sh", folder, **made)
    after = (folder / "pretrain_gpt.py").read_bytes()
    assert after.decode() == text.replace("<here>", "\n".join(OURS))
    script("apply_patches.sh", folder, "--revert", **made)
    assert git(folder, "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os\n\nprint(os)\n", "no place found: no top-level import beyond the standard"),
        ("@str\nclass A:\n    import torch\n", "no place found: line 2 goes on with a line before"),
        ("import os\nimport torch\nimport megatron_adaptra\n", "imports megatron_adaptra already"),
        ("import os\nfrom megatron_adaptra import x\n", "imports megatron_adaptra already"),
        ("import os\nprint 'two'\n", "is not Python"),
    ],
)
def test_no_place(tmp_path, source, says):
    folder = unpack(tmp_path / "m", source)
    assert says in script("make_patches.py", folder, "--out", tmp_path / "made", expect=2)
    assert not (tmp_path / "made").exists()


def test_make_refuses_what_is_no_checkout(tmp_path):
    assert "not a Megatron-LM checkout" in script("make_patches.py", tmp_path, expect=2)
    folder = unpack(tmp_path / "m")
    (folder / "megatron/core/package_info.py").write_text("MAJOR = 0\n")
    assert "does not say MAJOR" in script("make_patches.py", folder, expect=2)


def test_one_patch_per_line(tmp_path, checkout):
    other = unpack(tmp_path / "n", SOURCE + "# more\n", (0, 16, 0))
    out = tmp_path / "out"
    assert "another checkout of core_v0.16" in script(
        "make_patches.py", checkout, other, "--out", out, expect=2
    )
    newer = unpack(tmp_path / "o", SOURCE, (0, 17, 0))
    script("make_patches.py", checkout, newer, "--out", out)
    assert sorted(p.name for p in out.iterdir()) == ["core_v0.16.patch", "core_v0.17.patch"]
    assert git(checkout, "rev-parse", "HEAD").strip() in (out / "core_v0.16.patch").read_text()


@pytest.mark.parametrize("around", ["nothing", "sha256"])
def test_archive(tmp_path, made, around):
    """Unpacked from an archive, also in the middle of a repository that is another one."""
    outer = tmp_path / "outer"
    folder = unpack(outer / "un packed")
    if around != "nothing":
        git(outer, "init", "-q", f"--object-format={around}")
        (outer / "mine").write_text("not committed")
        git(outer, "add", ".")
    goes_in_and_out(folder, **made)


def refused(folder, **env):
    """Refused for every action; --check answers no. Returns the line."""
    before = (folder / "pretrain_gpt.py").read_bytes()
    line = script("apply_patches.sh", folder, expect=2, **env)
    assert script("apply_patches.sh", folder, "--check", expect=1, **env) == line
    assert (folder / "pretrain_gpt.py").read_bytes() == before
    return line


@pytest.mark.parametrize("staged", [False, True])
def test_dirty(checkout, made, staged):
    info = checkout / "megatron/core/package_info.py"
    info.write_text(info.read_text() + "# mine\n")
    (checkout / "untracked").write_text("does not matter")
    if staged:
        git(checkout, "add", info)
    assert "package_info.py'; commit or stash" in refused(checkout, **made)
    git(checkout, "reset", "-q", "--hard")
    script("apply_patches.sh", checkout, **made)
    info.write_text(info.read_text() + "# mine\n")
    assert "commit or stash" in script("apply_patches.sh", checkout, "--revert", expect=2, **made)
    git(checkout, "checkout", "-q", info)
    script("apply_patches.sh", checkout, "--revert", **made)
    assert git(checkout, "status", "--porcelain") == "?? untracked\n"


def test_edited(checkout, made):
    path = checkout / "pretrain_gpt.py"
    path.write_text(SOURCE + "# mine\n")
    line = refused(checkout, **made)
    assert "pretrain_gpt.py is not the one that core_v0.16.patch is for" in line
    assert "make_patches.py CHECKOUT --out FOLDER" in line
    assert script("apply_patches.sh", checkout, "--revert", expect=2, **made) == line
    # The way that it names.
    git(checkout, "commit", "-qam", "mine")
    script("make_patches.py", checkout, "--out", made["ADAPTRA_PATCHES"])
    goes_in_and_out(checkout, **made)
    # Edited after our lines came in: nothing is taken out of a file that is not known.
    script("apply_patches.sh", checkout, **made)
    path.write_text(path.read_text() + "# more\n")
    refused(checkout, **made)
    script("apply_patches.sh", checkout, "--revert", expect=2, **made)


def test_unknown_version(tmp_path, made):
    folder = commit(unpack(tmp_path / "new", version=(1, 2, 0)))
    line = refused(folder, **made)
    assert "is of line core_v1.2, and there are patches for core_v0.16 only" in line
    assert "core_v0.14 core_v0.15" in refused(folder)
    (tmp_path / "empty").mkdir()
    assert "patches for none" in refused(folder, ADAPTRA_PATCHES=tmp_path / "empty")


def test_no_checkout(tmp_path, checkout, made):
    assert "no such folder" in script("apply_patches.sh", tmp_path / "x", expect=2, **made)
    assert "it has no megatron/core" in script("apply_patches.sh", tmp_path, expect=2, **made)
    script("apply_patches.sh", tmp_path, "--check", expect=1, **made)
    (checkout / "pretrain_gpt.py").unlink()
    assert "it has no pretrain_gpt" in script("apply_patches.sh", checkout, expect=2, **made)
    (checkout / "pretrain_gpt.py").symlink_to("elsewhere.py")
    (checkout / "elsewhere.py").write_text(SOURCE)
    assert "symbolic link" in refused(checkout, **made)


def test_words():
    for words in ([], ["--undo", "x"], ["x", "y"], ["x", "--check", "--revert"], ["--check"]):
        script("apply_patches.sh", *words, expect=2)
    output = script("apply_patches.sh", "--help")
    assert all(word in output for word in ("--revert", "--check", "ADAPTRA_PATCHES", "Exit status"))


@pytest.mark.parametrize("command", ["cp", "git", "cat", "mv"])
def test_killed_half_way(tmp_path, checkout, made, command):
    """Killed at each command that writes: the file is whole, and the next call does it."""
    stand_in = tmp_path / "bin" / command
    stand_in.parent.mkdir()
    condition = '[[ " $* " != *" apply "* ]] || ' if command == "git" else ""
    real = shutil.which(command)
    stand_in.write_text(f'#!/usr/bin/env bash\n{condition}kill -9 $PPID\nexec {real} "$@"\n')
    stand_in.chmod(0o755)
    if command == "cat":  # --help uses it too, and nothing else before the file is written
        stand_in.write_text('#!/usr/bin/env bash\nhead -c 20 "$1"\nkill -9 $PPID\n')
    done = subprocess.run(
        [ROOT / "scripts/apply_patches.sh", checkout],
        **RUN,
        env={**ENV, **made, "PATH": f"{stand_in.parent}:{ENV['PATH']}"},
    )
    assert done.returncode != 0
    if command != "mv":  # which goes on after its parent has died
        assert (checkout / "pretrain_gpt.py").read_text() == SOURCE
    script("apply_patches.sh", checkout, **made)
    assert script("apply_patches.sh", checkout, "--check", **made) == "patched\n"


def test_patch_that_does_not_do_what_it_says(checkout, made):
    path = made["ADAPTRA_PATCHES"] / "core_v0.16.patch"
    good = path.read_text()
    path.write_text(good.replace("+megatron_adaptra.register()", "+megatron_adaptra.other()"))
    assert "does not make blob" in script("apply_patches.sh", checkout, expect=1, **made)
    path.write_text(good.replace("index ", "indices "))
    assert "has no line 'index" in refused(checkout, **made)
    assert git(checkout, "status", "--porcelain") == ""


@pytest.mark.parametrize("path", PATCHES, ids=lambda p: p.stem)
def test_kept_patches_are_our_lines_only(path):
    header, _, diff = path.read_text().partition("diff --git ")
    lines = ("diff --git " + diff).splitlines()
    script_of = "pretrain_gpt.py"
    assert path.stem in header
    assert lines[0] == f"diff --git a/{script_of} b/{script_of}"
    assert re.fullmatch(r"index [0-9a-f]{40}\.\.[0-9a-f]{40} 100644", lines[1])
    assert lines[2:4] == [f"--- a/{script_of}", f"+++ b/{script_of}"]
    after, new, count = re.fullmatch(r"@@ -(\d+),0 \+(\d+),(\d+) @@", lines[4]).groups()
    assert (int(new), int(count)) == (int(after) + 1, len(OURS))
    assert lines[5:] == ["+" + line for line in OURS]


def test_table_of_patches():
    table = dict(re.findall(r"`(\S+\.patch)` \| `(\w+)`", (ROOT / "patches/README.md").read_text()))
    blobs = {p.name: re.search(r"^index (\w+)", p.read_text(), re.M)[1] for p in PATCHES}
    assert table == blobs


@pytest.mark.skipif(not REAL, reason="set ADAPTRA_MEGATRON_LM=CHECKOUT:CHECKOUT... to test on them")
@pytest.mark.parametrize("real", REAL, ids=lambda p: p.name)
def test_real_checkout(tmp_path, real):
    git(tmp_path, "clone", "-q", "--shared", real.resolve(), "copy of it")
    folder = tmp_path / "copy of it"
    goes_in_and_out(folder)
    assert git(folder, "status", "--porcelain") == ""
    script("make_patches.py", folder, "--out", tmp_path / "made")
    (again,) = (tmp_path / "made").iterdir()
    kept = (ROOT / "patches" / again.name).read_text()
    assert again.read_text().partition("diff --git")[2] == kept.partition("diff --git")[2]

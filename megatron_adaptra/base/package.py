"""This copy of the package: its engine, and processes that run this copy and no other.

`python -m` looks into the working folder first, and so do torchrun's ranks: in a clone they find
the source tree, not what is installed. So our own processes begin with this file, as a script:

    python .../megatron_adaptra/base/package.py MODULE [its arguments]

runs a module of the package in whose folder this file is. For everything else sys.path is that of
`python -m MODULE`.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from urllib.parse import unquote, urlsplit

NAME = "megatron_adaptra"
_FILE = os.path.abspath(__file__)
HERE = os.path.dirname(os.path.dirname(_FILE))
# Whether Python was started with -P, or PYTHONSAFEPATH: it then adds no folder to sys.path.
SAFE_PATH = bool(getattr(sys.flags, "safe_path", False))


def script(module: str, *arguments: str) -> list[str]:
    """Return the words with which Python or torchrun runs a `module` with its `arguments`."""
    return [_FILE, module, *arguments]


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a `module` of this copy with `arguments`."""
    return [sys.executable, *script(module, *arguments)]


def how_to_build() -> str:
    """Return the command that builds this copy's engine, in place where it is a source tree.

    An installed copy is built from the folder that pip has installed it from.
    """
    root = os.path.dirname(HERE)
    words = [sys.executable, "-m", "pip", "install", "--no-deps"]
    if _is_source(root):
        return f"install g++, then: {shlex.join([*words, '--editable', root])}"
    words.append("--force-reinstall")
    if origin := _installed_from(root):
        return f"install g++, then: {shlex.join([*words, origin])}"
    return f"install g++, then in a clone of the project: {shlex.join([*words, '.'])}"


def _is_source(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "setup.py")) and os.path.isdir(
        os.path.join(folder, "csrc")
    )


def _installed_from(site: str) -> str:
    """Find the source tree that pip installed the package in `site` from; empty if it is gone."""
    from importlib.metadata import distributions

    for found in distributions(name=NAME, path=[site]):
        with suppress(ValueError, KeyError, TypeError):
            url = str(json.loads(found.read_text("direct_url.json") or "")["url"])
            folder = unquote(urlsplit(url).path)
            if url.startswith("file:") and _is_source(folder):
                return folder
    return ""


def prefer_installed(module: str) -> None:
    """Go on with the installed copy where `python -m MODULE` has found one without an engine.

    The working folder comes first only because Python puts it there: a copy that PYTHONPATH or an
    editable install names stays. So does this one if the other has no engine either. Otherwise
    this runs `module` of the other copy, and ends the process with its status; rank 0 says so.
    """
    if SAFE_PATH or os.path.realpath(sys.path[0]) != os.path.realpath(os.path.dirname(HERE)):
        return
    if _has_engine(HERE) or not _has_engine(other := _found_without_working_folder()):
        return
    if os.environ.get("RANK", "0") == "0":
        from megatron_adaptra.base.log import log_line

        log_line(f"the installed {other} runs, for {HERE} has no engine; {how_to_build()}")
    _run(other, module)
    sys.exit()


def _has_engine(folder: str) -> bool:
    """Return whether an engine for this Python was built in the package's `folder`."""
    engine = os.path.join(folder, "transport", "engine", "_native")
    return bool(folder) and any(os.path.exists(engine + suffix) for suffix in EXTENSION_SUFFIXES)


def _found_without_working_folder() -> str:
    """Return the folder where Python finds the package elsewhere; empty if there is none."""
    for finder in sys.meta_path:  # those of editable installs, too
        find = getattr(finder, "find_spec", None)
        spec = find(NAME, sys.path[1:], None) if find else None
        if spec is not None:
            return os.path.dirname(spec.origin or "")
    return ""


def _run(folder: str, module: str) -> None:
    """Run `module`, as the main one, of the package in `folder`, whatever sys.path has."""
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]
    spec = spec_from_file_location(
        NAME, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = package = module_from_spec(spec)
    spec.loader.exec_module(package)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if not SAFE_PATH:
        del sys.path[0]  # our own folder, which has a log.py and a units.py
        with suppress(FileNotFoundError):  # as with -m, also where the working folder is gone
            sys.path.insert(0, os.getcwd())
    del sys.argv[0]
    _run(HERE, sys.argv[0])

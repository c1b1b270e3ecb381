"""Commands in the folder of a clone whose engine was not built, with the package installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import strict

import megatron_adaptra
from megatron_adaptra.transport.engine.bindings import missing

PACKAGE = Path(megatron_adaptra.__file__).parent
ENGINE = "_native*"
built = pytest.mark.skipif(bool(missing()), reason=missing())
# Every Python of the environment writes at its end where its package and its engine are from.
WITNESS = """
import atexit, json, os, sys

def write():
    names = ("megatron_adaptra", "megatron_adaptra.transport.engine._native")
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    with open(os.path.join(os.environ["WITNESS"], str(os.getpid())), "w") as file:
        json.dump([*files, os.environ.get("RANK", "")], file)

if "WITNESS" in os.environ:
    atexit.register(write)
"""
SCRIPT = """
import json, os, sys
import megatron_adaptra
from megatron_adaptra.transport.engine.bindings import missing
files = [os.path.dirname(megatron_adaptra.__file__), missing()]
print(json.dumps([*files, sys.argv, __name__, sys.path]))
"""


class Place(NamedTuple):
    """An environment with the package installed, a clone, and an empty folder with a script."""

    python: Path
    installed: Path
    clone: Path
    outside: Path

    @property
    def script(self) -> Path:
        return self.outside / "train.py"

    @property
    def source(self) -> Path:
        return self.clone / PACKAGE.name

    @property
    def build(self) -> str:
        words = f"{self.python} -m pip install --no-deps --editable {self.clone}"
        return f"install g++, then: {words}"

    def run(
        self, *words: object, cwd: Path, expect: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        ours = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK")}
        done = subprocess.run(
            [str(self.python), *map(str, words)], cwd=cwd, env={**ours, **environment},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    def adaptra(
        self, *words: object, cwd: Path, expect: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """The command, as pip installs it."""
        command = self.python.with_name("adaptra")
        return self.run(command, *words, cwd=cwd, expect=expect, **environment)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("place").resolve()
    builder = venv.EnvBuilder(symlinks=True)
    builder.create(root / "venv")
    context = builder.ensure_directories(root / "venv")
    python = Path(context.env_exe)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([python, "-c", ask], text=True).strip())
    everything = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "others.pth").write_text("\n".join([*everything, "import witness"]))
    (site / "witness.py").write_text(WITNESS)
    shutil.copytree(PACKAGE, site / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    python.with_name("adaptra").write_text(
        "import sys\nfrom megatron_adaptra.cli.main import main\nsys.exit(main())\n"
    )
    clone = root / "clone"
    left_out = shutil.ignore_patterns("__pycache__", ENGINE)
    shutil.copytree(PACKAGE, clone / PACKAGE.name, ignore=left_out)
    (clone / "setup.py").touch()
    (clone / "csrc").mkdir()
    outside = root / "outside"
    outside.mkdir()
    (outside / "train.py").write_text(SCRIPT)
    return Place(python, site / PACKAGE.name, clone, outside)


def ran(done: subprocess.CompletedProcess[str]) -> list[list[object]]:
    """Package, what its engine lacks, argv, __name__ and path of each process of SCRIPT."""
    return [json.loads(line) for line in done.stdout.splitlines()]


@built
@pytest.mark.cold
def test_bench_measures_the_installed_engine(place: Place, tmp_path: Path) -> None:
    """Demo and doctor start their processes in the same way."""
    words = ("bench", "p2p", "--sizes", "4KiB", "--rounds", "1", "--json")
    done = place.adaptra(*words, cwd=place.clone, WITNESS=str(tmp_path))
    assert done.stderr == ""
    assert {"shm", "tcp"} <= {row["transport"] for row in strict(done.stdout)["rows"]}
    found = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    packages = {package for package, *_ in found if package}
    assert packages == {str(place.installed / "__init__.py")}
    engines = {rank: Path(engine) for _, engine, rank in found if engine and rank}
    assert sorted(engines) == ["0", "1"]
    assert all(engine.is_relative_to(place.installed) for engine in engines.values())


@built
@pytest.mark.cold
def test_adaptra_run_gives_its_ranks_the_installed_package(place: Place, tmp_path: Path) -> None:
    options = ("--standalone", "--nproc-per-node", "2", "--redirects", "1", "--log-dir", tmp_path)
    done = place.adaptra("run", *options, place.script, "--a", cwd=place.clone)
    assert "has no engine" not in done.stderr
    logs = sorted(tmp_path.glob("*/attempt_0/*/stdout.log"))
    printed = [json.loads(path.read_text()) for path in logs]
    assert [words[:4] for words in printed] == [
        [str(place.installed), "", [str(place.script), "--a"], "__main__"]
    ] * 2


@built
@pytest.mark.parametrize("module", ["megatron_adaptra.run", "megatron_adaptra"])
def test_python_m_goes_on_with_the_installed_package_and_says_so(place: Place, module: str) -> None:
    words = ["-m", module, *(["run"] if module == "megatron_adaptra" else []), place.script, "--a"]
    inside = place.run(*words, cwd=place.clone, RANK="0")
    outside = place.run(*words, cwd=place.outside, RANK="0")
    assert ran(inside) == ran(outside)
    assert ran(inside)[0][:2] == [str(place.installed), ""]
    assert outside.stderr == ""
    assert inside.stderr == (
        f"adaptra: the installed {place.installed} runs, for {place.source} has no engine; "
        f"{place.build}\n"
    )
    assert place.run(*words, cwd=place.clone, RANK="1", WORLD_SIZE="2").stderr == ""


@built
def test_the_status_and_the_options_of_python_stay(place: Place, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text("import sys; sys.exit(7 if sys.flags.optimize else 1)")
    place.run("-O", "-m", "megatron_adaptra.run", script, cwd=place.clone, expect=7)


@built
@pytest.mark.parametrize("why", ["PYTHONPATH", "an engine of its own", "no other engine"])
def test_the_source_tree_runs_where_it_is_meant(place: Place, why: str, tmp_path: Path) -> None:
    mine = place._replace(clone=tmp_path / "clone")
    shutil.copytree(place.clone, mine.clone, ignore=shutil.ignore_patterns("__pycache__"))
    named = {"PYTHONPATH": str(mine.clone)} if why == "PYTHONPATH" else {}
    if why == "an engine of its own":
        for engine in (PACKAGE / "transport" / "engine").glob(ENGINE):
            shutil.copy(engine, mine.source / "transport" / "engine")
    elif why == "no other engine":  # PYTHONPATH comes before what is installed
        named["PYTHONPATH"] = str(place.clone)
    done = mine.run("-m", "megatron_adaptra.run", mine.script, cwd=mine.clone, **named)
    assert done.stderr == ""
    ((package, lacks, *_),) = ran(done)
    assert package == str(mine.source)
    assert lacks == ("" if why == "an engine of its own" else lacks_engine(mine))


def lacks_engine(place: Place) -> str:
    error = "No module named 'megatron_adaptra.transport.engine._native'"
    return f"it was not built in {place.source} ({error}); {place.build}"


def test_without_an_engine_one_line_says_how_to_build_it(place: Place) -> None:
    named = {"PYTHONPATH": str(place.clone)}
    bench = place.adaptra("bench", "p2p", cwd=place.outside, expect=1, **named)
    says = f"adaptra: error: there is no engine to measure: {lacks_engine(place)}\n"
    assert bench.stderr == says


def test_what_is_installed_is_built_from_where_it_came_from(place: Place, tmp_path: Path) -> None:
    """No command names the package as if an index had it."""
    site = tmp_path / "site"
    left_out = shutil.ignore_patterns("__pycache__", ENGINE)
    shutil.copytree(PACKAGE, site / PACKAGE.name, ignore=left_out)
    ask = ("-c", "from megatron_adaptra.base.package import how_to_build; print(how_to_build())")
    says = place.run(*ask, cwd=place.outside, PYTHONPATH=str(site)).stdout
    pip = f"{place.python} -m pip install --no-deps --force-reinstall"
    assert says == f"install g++, then in a clone of the project: {pip} .\n"
    of = site / "megatron_adaptra-0.1.0.dist-info"
    of.mkdir()
    (of / "METADATA").write_text("Name: megatron-adaptra\nVersion: 0.1.0\n")
    (of / "direct_url.json").write_text(json.dumps({"url": place.clone.as_uri()}))
    says = place.run(*ask, cwd=place.outside, PYTHONPATH=str(site)).stdout
    assert says == f"install g++, then: {pip} {place.clone}\n"


@pytest.mark.cold
@pytest.mark.trains
def test_demo_says_at_once_that_it_falls_back(place: Place, tmp_path: Path) -> None:
    """To its user, and rank 0 to its log, once."""
    out = tmp_path / "out"
    words = ("demo", "--stages", "2", "--microbatches", "2", "--iterations", "9", "--out", out)
    done = place.adaptra(*words, cwd=place.outside, PYTHONPATH=str(place.clone))
    says = "adaptra: messages go over gloo, for there is no engine: "
    assert done.stderr.splitlines()[0] == says + lacks_engine(place)
    log = (out / "ranks.log").read_text().splitlines()
    assert [line for line in log if "no engine" in line] == [f"{says}rank 0: {lacks_engine(place)}"]


def test_a_child_has_the_path_and_the_words_of_python_m(place: Place) -> None:
    file = place.installed / "base" / "package.py"
    by_file = place.run(file, "megatron_adaptra.run", place.script, "--a", cwd=place.outside)
    by_name = place.run("-m", "megatron_adaptra.run", place.script, "--a", cwd=place.outside)
    assert ran(by_file) == ran(by_name)
    (place.installed / "shows.py").write_text("import json, sys; print(json.dumps(sys.path))")
    found = [
        place.run(*way, cwd=place.outside)
        for way in ((file, "megatron_adaptra.shows"), ("-m", "megatron_adaptra.shows"))
    ]
    assert found[0].stdout == found[1].stdout
    assert json.loads(found[0].stdout)[0] == str(place.outside)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_pythonsafepath_leaves_the_path_alone(place: Place, tmp_path: Path) -> None:
    """The first folder of PYTHONPATH, a checkout of Megatron perhaps, is not lost."""
    safe = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path)}
    for way in (("-m",), (place.installed / "base" / "package.py",)):
        done = place.run(*way, "megatron_adaptra.run", place.script, cwd=place.clone, **safe)
        ((package, *_, path),) = ran(done)
        assert package == str(place.installed)
        assert path[0] == str(tmp_path)

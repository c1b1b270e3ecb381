"""Every deliberate fault still fits the code; scripts/faults.py shows that each is caught."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from fitting import Fault, Misfit, changed, load
from fitting_engine import SOURCES

ROOT = Path(__file__).resolve().parents[2]
FAULTS = load()


def test_all_fit_the_code_and_their_tests_exist():
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 40
    wrong = []
    for fault in FAULTS:
        try:
            assert fault.wrong.endswith("."), "what is wrong is no sentence"
            assert with_fault(fault)
            for test in fault.tests:
                file, *names = test.partition("[")[0].split("::")
                source = (ROOT / file).read_text()
                there = all(f"def {n}(" in source or f"class {n}" in source for n in names)
                assert there, f"there is no {test}"
        except (Misfit, OSError, AssertionError) as error:
            wrong.append(f"{fault.id}: {error}")
    assert not wrong, "\n".join(wrong)


@cache
def with_fault(fault):
    """The text of its file, which Python, for a fault in the package, has compiled."""
    return changed(fault, ROOT)[1]


def test_faults_name_nothing_that_is_not_there(tmp_path):
    """A fault that ends in a NameError would be caught by any test."""
    for fault in (fault for fault in FAULTS if not fault.engine):
        (tmp_path / f"{fault.id}.py").write_text(with_fault(fault))
    words = ["check", "--isolated", "--select", "F821,F823", "--quiet", str(tmp_path)]
    found = subprocess.run([sys.executable, "-m", "ruff", *words], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


CODE = """
class Box:
    def open(self, key):
        if key in self.keys:  # a comment
            return self.inside[
                key
            ]
        return None


def open(key):
    return key
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "megatron_adaptra" / "deep").mkdir(parents=True)
    (tmp_path / "megatron_adaptra" / "deep" / "box.py").write_text(CODE)
    return tmp_path


def fault(where="Box.open", find="self.inside[key]", put="None", times=1):
    return Fault("x", "It is wrong.", where, find, put, (), times)


def test_an_expression_is_found_however_it_is_written(root):
    path, text = changed(fault(), root)
    assert path.name == "box.py"
    assert "return None\n        return None" in text.replace("            ", "        ")
    assert "return key" in text  # the other `open` is as it was


def test_statements_in_a_row(root):
    find = "if key in self.keys:\n    return self.inside[key]\nreturn None"
    _, text = changed(fault(find=find, put="if key:\n    return None\nreturn 1"), root)
    assert "self.inside" not in text
    assert "return 1" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"where": "Box.close"}, "no file"),
        ({"find": "self.outside[key]"}, "stands 0 times in Box.open, not 1"),
        ({"find": "key", "put": "lock"}, "stands 2 times"),
        ({"find": "self.inside[key"}, "cannot be parsed"),
        ({"put": "self.inside[ key ]"}, "are the same code"),
    ],
)
def test_what_does_not_fit_is_named(root, change, words):
    with pytest.raises(Misfit, match=words.replace("[", r"\[")):
        changed(fault(**change), root)


def test_a_function_that_is_there_twice_is_refused(root):
    (root / "megatron_adaptra" / "chest.py").write_text(CODE)
    with pytest.raises(Misfit, match=r"chest.py, megatron_adaptra/deep/box.py"):
        changed(fault(), root)


ENGINE = """
namespace {
double least(double a) { return std::min(a, 0.0); }  // Box::open() {
}  // namespace

Box::Box(const Device& device)
    : keys_{1, 2}, open_(device.box != nullptr && Box::open(keys_)) {}
Box::~Box() {
  if (open_) close(Box::open(0));
}

bool Box::open(Keys keys) const {
  // return keys.size() > 1e-6;
  return keys.size() >
         1e-6;
}
"""


@pytest.fixture
def engine(tmp_path):
    (tmp_path / SOURCES / "gpu").mkdir(parents=True)
    (tmp_path / SOURCES / "gpu" / "box.cpp").write_text(ENGINE)
    return tmp_path


def test_code_of_the_engine_is_found_however_it_is_written(engine):
    one = fault("Box::open", "return keys.size()>1e-6;", "return true;")
    path, text = changed(one, engine)
    assert path.name == "box.cpp"
    before, _, after = ENGINE.partition("  return keys.size() >\n         1e-6;")
    assert text == before + "  return true;" + after


@pytest.mark.parametrize(
    ("where", "find", "put"),
    [("Box::Box", "{1, 2}", "{1}"), ("Box::~Box", "close(Box::open(0))", "(void)open_")],
)
def test_constructors_and_destructors_of_the_engine(engine, where, find, put):
    _, text = changed(fault(where, find, put), engine)
    assert text == ENGINE.replace(find, put)


@pytest.mark.parametrize(
    ("where", "find", "words"),
    [
        ("Box::close", "1", "Box::close has to be found once in csrc/rdma_offload; it is in no"),
        ("Box::open", "1e-7", "`1e-7` stands 0 times in Box::open, not 1"),
        ("Box::open", "None", "are the same code"),
    ],
)
def test_what_does_not_fit_the_engine_is_named(engine, where, find, words):
    with pytest.raises(Misfit, match=words):
        changed(fault(where, find), engine)

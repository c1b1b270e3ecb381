"""Every deliberate fault still fits the code; scripts/faults.py shows that each is caught."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from fitting import SOURCES, Fault, Misfit, changed, load

ROOT = Path(__file__).resolve().parents[3]
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
double least(double a) { return std::min(a, 0.0); }  // Box::open() {

Box::Box(const Device& device) { open_ = Box::open(keys_); }
bool Box::open(Keys keys) const {
  if (keys.empty()) {
    return true;
  }
  return keys.size() >
         1e-6;
}

void Box::close() { Box::open(1e-6); }
"""


def test_code_of_the_engine_is_found_where_lines_are_broken_otherwise(tmp_path):
    box = tmp_path / SOURCES / "gpu" / "box.cpp"
    box.parent.mkdir(parents=True)
    box.write_text(ENGINE)
    path, text = changed(fault("Box::open", "return keys.size() > 1e-6;", "return true;"), tmp_path)
    assert path == box
    before, _, after = ENGINE.partition("return keys.size() >\n         1e-6;")
    assert text == before + "return true;" + after
    for where, find, words in (
        ("Box::shut", "1", "Box::shut has to be found once in csrc/rdma_offload; it is in no"),
        ("Box::open", "1e-7", "`1e-7` stands 0 times in Box::open, not 1"),
        ("Box::open", "return", "stands 2 times"),
        ("Box::open", "None", "are the same code"),
    ):
        with pytest.raises(Misfit, match=words):
            changed(fault(where, find), tmp_path)

"""Every deliberate fault still fits the code; scripts/faults.py shows that each is caught."""

import subprocess
import sys
from pathlib import Path

import pytest
from fitting import Fault, Misfit, changed, load

ROOT = Path(__file__).resolve().parents[2]
FAULTS = load()


def test_ids_and_sentences():
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 20
    for fault in FAULTS:
        assert fault.wrong.endswith("."), fault.id


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_fits_the_code_and_its_tests_exist(fault):
    _, text = changed(fault, ROOT)
    compile(text, fault.id, "exec")
    for test in fault.tests:
        file, *names = test.partition("[")[0].split("::")
        source = (ROOT / file).read_text()
        assert all(f"def {name}(" in source or f"class {name}" in source for name in names), test


def test_faults_name_nothing_that_is_not_there(tmp_path):
    """A fault that ends in a NameError would be caught by any test."""
    for fault in FAULTS:
        (tmp_path / f"{fault.id}.py").write_text(changed(fault, ROOT)[1])
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

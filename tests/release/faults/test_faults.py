"""Every deliberate fault still fits the code; scripts/faults.py shows that each is caught."""

import subprocess
import sys
from functools import cache
from pathlib import Path

from fitting import Misfit, changed, load

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

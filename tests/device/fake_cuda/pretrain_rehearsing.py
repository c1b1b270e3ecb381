"""The training program of tests, in which the rehearsal of our messages meets a fault.

FAKE_REHEARSAL: its name in rehearsal_faults.py. FAKE_PROGRAM: another program, as for
pretrain_changing_links.py.
"""

import os
import runpy
import sys
from pathlib import Path

small = Path(__file__).parents[2] / "train" / "ranks" / "pretrain_gpt_small.py"
sys.path.insert(0, str(small.parent))

from rehearsal_faults import FAULTS  # noqa: E402

FAULTS[os.environ["FAKE_REHEARSAL"]]()
runpy.run_path(os.environ.get("FAKE_PROGRAM", str(small)), run_name="__main__")

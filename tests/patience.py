"""How long a test waits for what has to come."""

import os

# Seconds until a wait is given up; nothing is measured with it, so it is long. Where a fault makes
# a test hang, scripts/faults.py wants to see it sooner.
PATIENCE = float(os.environ.get("ADAPTRA_TEST_PATIENCE", 300))

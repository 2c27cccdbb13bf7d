"""Python imports this at the start of each process of a run with faults: engines become ones that can be told to fail.

`fault_trials/places.py` puts this directory on ``PYTHONPATH``. Other processes stay as they are.
"""

import os
import sys

if os.environ.get("FAULT_TRIAL_ORDERS") and "hpcrl.inference.embedded.server" in sys.orig_argv:
    import fault_trial_engine

    fault_trial_engine.install()

"""What the ranks of tests are forked with: imported once in a worker, and left alone by the collector of cycles.

Otherwise each rank imports the helpers anew, and its collector looks through all of torch's objects several times: half
of the processor's time of a short rank.
"""

import gc

gc.disable()

import pytest  # noqa: E402, F401 - every test module imports it
import torch._dynamo  # noqa: E402, F401
import trainer_testing  # noqa: E402, F401

import hpcrl.trainer.loop  # noqa: E402
import hpcrl.trainer.state.checkpoint  # noqa: E402, F401

gc.freeze()
gc.enable()

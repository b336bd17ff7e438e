"""The process while models are run."""

import gc
import json
import subprocess
import sys

import pytest

from portproof.io.process import proving

# The pages that the system clears for ten blocks of 64 MiB, one after the other.
FAULTS = """
import json, resource
import numpy as np
from portproof.io.process import proving

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.frombuffer(bytearray(2**26), np.uint8)[::4096].sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

outside = faults()
with proving():
    faults()
    inside = faults()
print(json.dumps([outside, inside, faults()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told what to keep")
def test_memory_that_is_let_go_is_kept_in_the_context_and_given_back_after_it():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    outside, inside, after = json.loads(done.stdout)
    assert inside < 0.3 * outside and after > 0.7 * outside


def test_objects_are_no_garbage_in_the_context_and_are_collected_after_it():
    before = gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), proving():
        assert gc.get_freeze_count() > before
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0

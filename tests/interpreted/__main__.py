"""Triton kernels against their plain definitions; run as a program, under TRITON_INTERPRET=1 where there is no GPU.

Names of kernels' files as arguments restrict it to these.
"""

import importlib
import sys
import time
import warnings
from pathlib import Path

from hypothesis import settings

FILES = [file.stem for file in sorted(Path(__file__).parent.glob("[a-z]*.py")) if file.stem != "cases"]

settings.register_profile("kernels", max_examples=8, deadline=None, derandomize=True, database=None)


def main(names):
    settings.load_profile("kernels")
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="triton.runtime.interpreter")  # numpy's, of logarithms of zero
    for name in names:
        module = importlib.import_module(name)
        for check in [getattr(module, check) for check in dir(module) if check.startswith("check_")]:
            start = time.process_time()
            check()
            print(f"{name}: {check.__name__[6:].replace('_', ' ')} ({time.process_time() - start:.1f} s)")


if __name__ == "__main__":
    main(sys.argv[1:] or FILES)

"""One thread per test process: pytest-xdist already fills the cores, and threads of two processes
that compete for one core wait for each other at every operation, which is many times slower."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

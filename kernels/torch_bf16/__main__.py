"""``python -m torch_bf16``."""

import gc
import sys

from .tools.cli import main

status = main()
# The process is ending: spare the last garbage collection everything that was imported.
gc.freeze()
sys.exit(status)

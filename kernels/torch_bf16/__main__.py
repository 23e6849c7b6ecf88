"""``python -m torch_bf16``."""

import gc
import sys

from .tools.cli import main

status = main()
# The process ends: what torch and others have imported need not be looked through for garbage.
gc.freeze()
sys.exit(status)

"""A plugin of pytest's, by which tests of GPUs run on the devices of ``hollow_cuda.py``.

PYTHONPATH=tests/support python -m pytest -p hollow_plugin -m gpu tests/sharding
"""

import atexit
import os
import tempfile
from pathlib import Path

import forkserver
from hollow_cuda import Device, build
from interpreter_speed import patch_language_once

LIBRARY = "HOLLOW_CUDA"

if LIBRARY not in os.environ:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    # The processes of ranks read it, too.
    os.environ[LIBRARY] = str(build(Path(folder.name)))
# There, too, the devices come before torch.
forkserver.IMPORTS.insert(0, "hollow_plugin")
Device(Path(os.environ[LIBRARY])).let_triton_interpret()
patch_language_once()

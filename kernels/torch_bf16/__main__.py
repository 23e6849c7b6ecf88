"""``python -m torch_bf16``."""

import sys

from .tools.cli import main

sys.exit(main())

"""``python -m torch_bf16``."""

import sys

from .cli import main

sys.exit(main())

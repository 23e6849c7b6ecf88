"""Each Trainer and Fabric looks for callbacks in all installed packages: 20 ms, unless cached.

To be imported before the hosts are.
"""

import functools
import importlib.metadata

importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)

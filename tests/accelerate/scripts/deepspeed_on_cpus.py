"""Runs a script that knows nothing of it where DeepSpeed finds CPUs: on_cpus.py SCRIPT ARGUMENTS.

Its first import there would compile a transport, which takes a minute and a compiler.
"""

import runpy
import sys
from collections import defaultdict

import deepspeed

deepspeed.ops.__compatible_ops__ = defaultdict(bool)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")

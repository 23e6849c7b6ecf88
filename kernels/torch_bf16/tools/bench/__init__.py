"""Speed and memory of optimizer steps: ours, torch's and other libraries', in one run.

The command is ``python -m torch_bf16 bench``; :mod:`.command` is what it does.
"""

from .entries import OURS, Entry
from .memory import peak_bytes
from .models import MODELS, random_shapes
from .peers import PEERS, Peer
from .rounds import Measured, Result, measure

__all__ = [
    "MODELS",
    "OURS",
    "PEERS",
    "Entry",
    "Measured",
    "Peer",
    "Result",
    "measure",
    "peak_bytes",
    "random_shapes",
]

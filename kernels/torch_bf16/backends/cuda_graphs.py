"""Whether a CUDA graph is being captured."""

from collections.abc import Iterable

import torch

__all__ = ["capturing"]


def capturing(devices: Iterable[torch.device]) -> bool:
    """Whether a CUDA graph is being captured on the current stream of one of these devices."""
    if not torch.cuda.is_initialized():
        return False
    for device in {each for each in devices if each.type == "cuda"}:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return True
    return False

"""Whether a CUDA graph is being captured."""

import torch

__all__ = ["capturing"]


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

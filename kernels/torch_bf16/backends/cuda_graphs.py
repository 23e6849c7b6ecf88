"""CUDA graphs: whether one is being captured, and recording some launches in one."""

import contextlib
from collections.abc import Callable, Iterable

import torch

__all__ = ["capturing", "record"]

_NOTHING = contextlib.nullcontext()


def capturing(devices: Iterable[torch.device]) -> bool:
    """Whether a CUDA graph is being captured on the current stream of one of these devices."""
    if not torch.cuda.is_initialized():
        return False
    current = torch.cuda.current_device()
    for device in set(devices):
        if device.type != "cuda":
            continue
        # Entering a device takes longer than the check itself.
        with _NOTHING if device.index == current else torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return True
    return False


def record(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture launches on a device in a graph, and return the function that replays them.

    A replay runs in the stream that is current at that time.

    Args:
        launch: launches kernels and allocates nothing; called once, under capture, where kernels
            do not run.
        device: a CUDA or ROCm device.
    """
    # torch's own stream for captures belongs to the first device that needed one.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    capture = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
    with torch.cuda.device(device), capture:
        launch()
    return graph.replay

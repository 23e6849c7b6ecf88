"""CUDA graphs: whether one is being captured, and one of some launches."""

import contextlib
from collections.abc import Callable, Iterable

import torch

__all__ = ["capturing", "record"]

_NOTHING = contextlib.nullcontext()


def capturing(devices: Iterable[torch.device]) -> bool:
    """Whether a CUDA graph is being captured on the current stream of one of these devices."""
    if not torch.cuda.is_initialized():
        return False
    here, ask = torch.cuda.current_device(), torch.cuda.is_current_stream_capturing
    for device in set(devices):
        if device.type != "cuda":
            continue
        # To enter a device takes longer than to ask.
        with _NOTHING if device.index == here else torch.cuda.device(device):
            if ask():
                return True
    return False


def record(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What replays launches on a device, in the stream that is current then.

    Args:
        launch: launches kernels and allocates nothing; called once while it is captured, when
            kernels do not run.
        device: a CUDA or ROCm device.
    """
    # torch's own stream for captures is of the device that was the first to have one.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    capture = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
    with torch.cuda.device(device), capture:
        launch()
    return graph.replay

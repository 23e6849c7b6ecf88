"""What stands for a CUDA graph where Triton's interpreter runs kernels on CPU tensors."""

import pytest
import torch


class Graph:
    """What a CUDA graph keeps of a step: its launches, and the copies between tables.

    Args:
        patch: undone where the capture ends.
    """

    def __init__(self, patch):
        from torch_bf16.backends import cuda_graphs
        from torch_bf16.backends.triton.kernel import step

        self.launches = []
        kind = type(step)
        own = kind.__getitem__

        def recording(kernel, grid):
            def launch(*arguments, **options):
                self.launches.append(lambda: own(kernel, grid)(*arguments, **options))

            return launch

        def zero(tensor):
            self.launches.append(lambda: set_zero(tensor))
            return set_zero(tensor)

        set_zero = torch.Tensor.zero_
        patch.setattr(kind, "__getitem__", recording)
        patch.setattr(torch.Tensor, "zero_", zero)
        patch.setattr(cuda_graphs, "capturing", lambda devices: True)

    def replay(self):
        for launch in self.launches:
            launch()


def record(launch, device):
    """For :func:`torch_bf16.backends.cuda_graphs.record`."""
    with pytest.MonkeyPatch.context() as patch:
        graph = Graph(patch)
        launch()
    assert graph.launches
    return graph.replay

"""What stands for a CUDA graph where Triton's interpreter runs kernels on CPU tensors."""

import pytest


class Graph:
    """What a CUDA graph keeps of a step: its launches, and the copies between tables.

    Args:
        patch: undone where the capture ends.
    """

    def __init__(self, patch):
        from torch_bf16.backends import cuda_graphs
        from torch_bf16.backends.triton import launch, scalars

        self.launches = []
        for room, name in ((launch, "step"), (scalars, "prepare")):
            patch.setattr(room, name, self._recording(getattr(room, name)))
        patch.setattr(cuda_graphs, "capturing", lambda devices: True)

    def _recording(self, kernel):
        class Recording:
            def __getitem__(_, grid):
                def launch(*arguments, **options):
                    self.launches.append(lambda: kernel[grid](*arguments, **options))

                return launch

        return Recording()

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

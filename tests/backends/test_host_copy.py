"""A copy on the host has the numbers that the tensor had."""

import torch

from torch_bf16.backends.host_copy import HostCopy


def test_a_tensor_may_be_written_before_its_copy_is_read():
    tensor = torch.arange(4)
    copy = HostCopy(tensor)
    tensor.zero_()
    assert copy.is_there
    assert copy.read().tolist() == [0, 1, 2, 3]

"""What holds an optimizer: another optimizer, and a wrapper of a host."""

import torch


class Around(torch.optim.Optimizer):
    """Has the groups of what it wraps, as SAM does."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups


class Wrapper:
    """Of a host: no optimizer itself."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

"""The seed of torch's generators, without what ``torch.manual_seed`` keeps for devices to come."""

import torch

__all__ = ["seed"]


def seed(number: int) -> None:
    """Seed the generators that there are; torch keeps three tracebacks for those that are not."""
    available = torch.cuda.is_available()
    (torch.manual_seed if available else torch.default_generator.manual_seed)(number)

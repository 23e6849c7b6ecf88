"""What torchrun tells a process, for hosts that ask the environment which rank they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist


@contextmanager
def as_torchrun_says() -> Iterator[None]:
    """This rank, whose group is there already: a host makes no other and leaves this one.

    What the host itself writes to the environment is taken back for the next call.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "ranks",
        # Nobody meets there: the group is made.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    with mock.patch.dict(os.environ, variables):
        yield

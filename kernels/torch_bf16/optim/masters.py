"""What weights have beyond the parameters, between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_bf16.engine.member import Snapshot
from torch_bf16.engine.plan import Plan
from torch_bf16.formats import Format
from torch_bf16.model import residuals
from torch_bf16.sharding import local, shard_of
from torch_bf16.states.recoding import stored_format
from torch_bf16.states.views import masters_in

__all__ = ["exact_weight", "forget_overwritten", "invalidate_remainders"]


def exact_weight(parameter: Tensor, state: Mapping[str, Any], snapshot: Snapshot | None) -> Tensor:
    """The fp32 number that the next step starts from.

    Args:
        parameter: of an optimizer of ours.
        state: its state, possibly empty.
        snapshot: what it was when the last step had updated it.

    Returns:
        New fp32 tensor, shaped like the parameter; the parameter itself if it is fp32.
    """
    if parameter.dtype != torch.bfloat16:
        return parameter.detach()
    shard = shard_of(parameter)
    visible = shard.memory.contiguous()
    masters = masters_in({key: local(each) for key, each in state.items()})
    written = snapshot is not None and snapshot.version != shard.version()
    if not masters and (known := residuals.second_plane(shard, torch.int16)) is not None:
        masters = {"remainder16": known}
    format_ = stored_format(masters, "") if masters else None
    if format_ is None or (written and format_.remainders):
        return shard.place(visible.float())
    planes = [visible, *(masters[key] for key in format_.plane_names("")[1:])]
    return shard.place(format_.decode(planes))


def invalidate_remainders(written: Iterable[tuple[Mapping[str, Any], Format]]) -> None:
    """Drop the lower half of weights that something else has written since the last step.

    Args:
        written: state and format of each such weight.
    """
    for state, format_ in written:
        for key in format_.remainders:
            local(state[key]).zero_()


def forget_overwritten(plan: Plan) -> bool:
    """The same for those of a plan that take part; whether there were any."""
    written = plan.written()
    invalidate_remainders((each.state, each.formats[0]) for each in written)
    return bool(written)

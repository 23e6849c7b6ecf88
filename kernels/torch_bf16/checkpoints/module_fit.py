"""Whether a module can load what was saved of one, asked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_bf16.errors import CheckpointError, with_article
from torch_bf16.sharding import is_dtensor

__all__ = ["check_fits"]


def check_fits(module: nn.Module, state: Any, label: str) -> None:
    """Compare names, shapes and kinds of tensors, so that a module is not left half loaded.

    Parts that convert what they load, such as old names, are left to torch, which compares later.

    Args:
        module: the module that is to load.
        state: what was saved of it.
        label: what the message calls that.

    Raises:
        CheckpointError: the module could not load all of it, or not without changing numbers.
    """
    converting = tuple(_converting(module))
    saved = _without(converting, state if isinstance(state, Mapping) else {})
    live = _without(converting, module.state_dict())
    lacking, unknown = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys())
    shapes = {
        name: (tuple(each.shape), tuple(getattr(saved.get(name), "shape", ())))
        for name, each in live.items()
        if isinstance(each, torch.Tensor)
    }
    other = [f"{name} {b} for {a}" for name, (a, b) in shapes.items() if a != b]
    if lacking or unknown or other:
        faults = [
            f"{kind} {', '.join(names[:4])}"
            for kind, names in (("lacks", lacking), ("has unknown", unknown), ("has shapes", other))
            if names
        ]
        raise CheckpointError(
            f"{label} is of another model: it {'; it '.join(faults)}. Load it into the model that "
            "it was saved from. Nothing was changed"
        )
    for name, each in live.items():
        if not isinstance(each, torch.Tensor):
            continue
        if not _takes(each, saved[name]):
            raise CheckpointError(
                f"{label} has {_described(saved[name])} for {name!r}, and the model's own is "
                f"{_described(each)}, which cannot take such numbers. Save the state dict "
                "of the model that is to load it. Nothing was changed"
            )
        if is_dtensor(each) != is_dtensor(saved[name]):
            raise CheckpointError(_of_other_placement(label, name, is_dtensor(each)))


def _converting(module: nn.Module) -> Iterator[str]:
    """The prefixes of parts that may load other names and shapes than they save."""
    for name, part in module.named_modules():
        own = type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
        # Batch norms only count batches that an old file has not counted.
        by_torch = isinstance(part, torch.nn.modules.batchnorm._NormBase)
        if part._load_state_dict_pre_hooks or (own and not by_torch):
            yield f"{name}." if name else ""


def _without(prefixes: tuple[str, ...], state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in state.items() if not str(name).startswith(prefixes)}


def _takes(live: torch.Tensor, saved: Any) -> bool:
    """Whether a tensor can take over saved numbers, which may be rounded and no more than that."""
    return (
        isinstance(saved, torch.Tensor)
        and saved.layout == live.layout
        and saved.is_meta <= live.is_meta
        and torch.can_cast(saved.dtype, live.dtype)
    )


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return with_article(value)
    place = " on the meta device, without numbers" if value.is_meta else ""
    return f"a tensor of {value.dtype}, {str(value.layout).removeprefix('torch.')}{place}"


def _of_other_placement(label: str, name: str, live_is_sharded: bool) -> str:
    if not live_is_sharded:
        return (
            f"{label} has {name!r} as a sharded tensor, and the model's own is not sharded. Save "
            "the whole state dicts of torch.distributed.checkpoint.state_dict.get_state_dict(..., "
            "options=StateDictOptions(full_state_dict=True)). Nothing was changed"
        )
    return (
        f"{label} has {name!r} as a whole tensor, and the model's own is sharded. On all ranks "
        "read the file by parts = load_checkpoint(path), and call torch.distributed.checkpoint."
        "state_dict.set_state_dict(model, optimizer, model_state_dict=parts[...], "
        "optim_state_dict=parts[...], options=StateDictOptions(full_state_dict=True)). Nothing was "
        "changed"
    )

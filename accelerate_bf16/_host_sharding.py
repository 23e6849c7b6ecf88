"""The seam to the way in which Accelerate shards a model, and loads its optimizer's states."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import nn

from .modes import canonical
from .refusals import refuse_flat
from .sharding import flat_policy, policy

__all__ = ["choosing_the_policy", "groups_of_their_own", "load_states_into_fresh_optimizers"]


def choosing_the_policy(original: Any) -> Any:
    """``FullyShardedDataParallelPlugin.set_mixed_precision`` that knows our modes."""

    def set_mixed_precision(
        self: Any, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        mode = canonical(mixed_precision)
        if mode is None:
            return original(self, mixed_precision, buffer_autocast, override)
        flat = getattr(self, "fsdp_version", 1) != 2
        if flat:
            refuse_flat(mode, self)
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = flat_policy() if flat else policy()
        else:  # the user's own, an object or the entries of one
            original(self, "bf16")

    return set_mixed_precision


@contextmanager
def groups_of_their_own(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, Accelerate shards these modules by themselves, before those around them.

    Args:
        modules: what stays in fp32; gathered as it is.
    """
    import torch.distributed.fsdp as fsdp

    original = getattr(fsdp, "fully_shard", None)
    if original is None or not modules:
        yield
        return
    apart = {id(each) for each in modules}
    inside = {id(sub) for each in modules for sub in each.modules()}

    def fully_shard(module: Any, **options: Any) -> Any:
        whole = list(module) if isinstance(module, (list, tuple)) else [module]
        own = {**options, "mp_policy": replace(options["mp_policy"], param_dtype=None)}
        if inside.issuperset(map(id, whole)):
            return original(module, **own)
        for each in whole:
            for sub in each.modules():
                if id(sub) in apart and not isinstance(sub, fsdp.FSDPModule):
                    original(sub, **own)
        rest = [each for each in whole if not isinstance(each, fsdp.FSDPModule)]
        if not rest:
            return module
        return original(rest[0] if rest == [module] else rest, **options)

    fsdp.fully_shard = fully_shard
    try:
        yield
    finally:
        fsdp.fully_shard = original


def load_states_into_fresh_optimizers() -> None:
    """Let a new optimizer take what ``load_fsdp_optimizer`` reads for FSDP1.

    Accelerate asks the optimizer which states there are to read from a sharded file, and reads none
    into one that has not stepped yet, in every mode and without a word.
    """
    name = "load_fsdp_optimizer"
    original = getattr(sys.modules.get("accelerate.utils.fsdp_utils"), name, None)
    if original is None or hasattr(original, "_before_bf16"):
        return

    @functools.wraps(original)
    def load_fsdp_optimizer(
        fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        flat = getattr(fsdp_plugin, "fsdp_version", 1) == 1
        if flat and canonical(accelerator.state._mixed_precision):
            from .optimizers import make_states

            make_states(optimizer, model)
        return original(fsdp_plugin, accelerator, optimizer, model, *args, **kwargs)

    load_fsdp_optimizer._before_bf16 = original  # pyright: ignore
    for holder in list(sys.modules.values()):
        if isinstance(holder, ModuleType) and vars(holder).get(name) is original:
            setattr(holder, name, load_fsdp_optimizer)

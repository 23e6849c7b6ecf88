"""How Accelerate shards a model, and loads its optimizer's states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelerate_bf16.modes import mode_of
from bf16_autoload import Patches

if TYPE_CHECKING:
    from torch import nn

__all__ = ["load_fsdp_optimizer", "separate_groups"]


def load_fsdp_optimizer(original: Any) -> Any:
    """Let a new optimizer load sharded states under FSDP1.

    Accelerate reads only the states that the optimizer already has from a sharded file, so it
    silently reads none into an optimizer that has not taken a step, in every mode.
    """

    def load_fsdp_optimizer(
        fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        flat = getattr(fsdp_plugin, "fsdp_version", 1) == 1
        if flat and mode_of(accelerator):
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            from accelerate_bf16.optimizers import unwrap_optimizer

            if not unwrap_optimizer(optimizer).state:
                # This creates the states by a step of no length first, as for FSDP2.
                get_optimizer_state_dict(model, unwrap_optimizer(optimizer))
        return original(fsdp_plugin, accelerator, optimizer, model, *args, **kwargs)

    return load_fsdp_optimizer


@contextmanager
def separate_groups(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which Accelerate shards these fp32 modules separately, before their parents."""
    import torch.distributed.fsdp as fsdp

    if not modules:
        yield
        return
    original: Any = fsdp.fully_shard
    separate = {id(each) for each in modules}
    inside = {id(sub) for each in modules for sub in each.modules()}

    def fully_shard(module: Any, **options: Any) -> Any:
        parts = list(module) if isinstance(module, (list, tuple)) else [module]
        fp32_options = {**options, "mp_policy": replace(options["mp_policy"], param_dtype=None)}
        if inside.issuperset(map(id, parts)):
            return original(module, **fp32_options)
        for each in parts:
            for sub in each.modules():
                if id(sub) in separate and not isinstance(sub, fsdp.FSDPModule):
                    original(sub, **fp32_options)
        remaining = [each for each in parts if not isinstance(each, fsdp.FSDPModule)]
        if not remaining:
            return module
        return original(remaining[0] if remaining == [module] else remaining, **options)

    with Patches() as patches:
        patches.set(fsdp, "fully_shard", fully_shard)
        yield

"""DDP: whether it reads sums of micro-batches, how it reduces fp32 sums, and when it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .backward import Passes, released
from .reduce_scatter import all_reduce_mean

__all__ = ["Bucket", "DdpPass", "Fp32Reduction", "announce", "announce_buckets", "hook_holder"]


class DdpPass:
    """Whether a DDP module reads gradients as they come, because it reduces them in this pass.

    Attributes:
        reads: whether it does; True where that is not certain.
        over: whether a backward pass has been over since the last forward pass.
        hooks: of the module.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self.reads = self.over = True
        self.hooks = [module.register_forward_hook(self._after_forward)]

    @classmethod
    def all_in(cls, model: nn.Module) -> list[DdpPass]:
        """Those of the DDP modules in a model."""
        return [cls(m) for m in model.modules() if isinstance(m, DistributedDataParallel)]

    def _after_forward(self, module: Any, *_: Any) -> None:
        # What the forward pass prepares the reducer for; without, as in no_sync, that stays as it
        # was until a backward pass is over.
        if module.require_forward_param_sync:
            self.reads, self.over = True, False
        elif self.over:
            self.reads = False


class _Kept(dict[Any, Any]):
    """The fp32 gradients that one backward pass has brought, by parameter."""

    def put_back(self) -> None:
        """Show them again."""
        for parameter, gradient in self.items():
            parameter.grad = gradient
        self.clear()

    # A pass that fails has no other end.
    __del__ = put_back


class Fp32Reduction:
    """The fp32 gradients of one DDP module. Made by :meth:`of`.

    DDP refuses gradients of another dtype than the parameters'. So it is shown none: they are kept
    here while a backward pass runs, and a communication hook reduces them instead of the bucket it
    is given.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._group: Any = module.process_group
        self._parameters = set(module.parameters())
        self._passes = Passes(_Kept, _Kept.put_back)
        self._active = False

    @classmethod
    def of(cls, model: nn.Module) -> Fp32Reduction | None:
        """That of the DDP module in ``model``, or None where there is none.

        Raises:
            ValueError: an option or a communication hook of it stands in the way.
        """
        found = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        if not found:
            return None
        (module, *more) = found
        why = None
        if more:
            why = "the model holds several DDP modules; give each an optimizer of its own"
        elif module.gradient_as_bucket_view:
            why = "with gradient_as_bucket_view=True gradients are bf16 views; set it to False"
        elif module.find_unused_parameters:
            why = (
                "with find_unused_parameters=True DDP reads gradients before the backward pass; "
                "set it to False, or use static_graph=True"
            )
        # DDP takes one communication hook in its life.
        reduction: Any = getattr(module, "_torch_bf16_reduction", None)
        if reduction is None and (holder := hook_holder(module)):
            why = f"its DDP module has a communication hook already, that of {holder}: leave it out"
        if why:
            raise ValueError(
                f"gradients cannot be accumulated in 'fp32': {why}, or accumulate in "
                "'bf16_stochastic'"
            )
        if reduction is None:
            reduction = cls(module)
            module.register_comm_hook(None, reduction._reduce)
            module._torch_bf16_reduction = reduction  # pyright: ignore
        reduction._active = True
        return reduction

    def hook(self, parameter: Tensor) -> list[Any]:
        """Keep this parameter's gradients here during backward; returns the hooks' handles."""
        if parameter not in self._parameters:
            return []
        return [parameter.register_post_accumulate_grad_hook(self._keep)]

    def remove(self) -> None:
        """Leave the reduction to DDP, in the parameters' dtype."""
        self._active = False

    def _keep(self, parameter: Any) -> None:
        running = self._passes.current()
        if parameter.dtype != torch.bfloat16 or running is None:
            return
        # That of a pass around this one, which this one was not added to.
        for each in self._passes:
            if parameter in each:
                parameter.grad = each.pop(parameter) + parameter.grad
        running[parameter] = parameter.grad
        parameter.grad = None

    # DDP compares annotations with its own types, and these are strings here.
    def _reduce(self, _, bucket):
        """DDP's communication hook: the mean over all ranks, in fp32."""
        size, buffer = dist.get_world_size(self._group), bucket.buffer()
        if not self._active or buffer.dtype != torch.bfloat16:
            return all_reduce_mean(buffer, self._group)
        for parameter in bucket.parameters():
            # A pass within this one, as under reentrant checkpointing, has put it back already.
            if parameter.grad is not None:
                self._keep(parameter)
        kept = {parameter: g for each in self._passes for parameter, g in each.items()}
        # DDP's own zeros for what no micro-batch has used, or on a rank that has left by join().
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        gradients: list[Any] = [kept.get(parameter, zeros) for parameter, zeros in pairs]
        whole = torch.cat([gradient.reshape(-1).float() for gradient in gradients]).div_(size)
        future = dist.all_reduce(whole, group=self._group, async_op=True).get_future()  # pyright: ignore

        def put(done: Any) -> Tensor:
            pieces = done.value()[0].split([gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view(gradient.shape))
            return buffer

        return future.then(put)


class Bucket:
    """What one optimizer has released of a bucket that DDP reduces.

    Attributes:
        parameters: whose gradients lie in it.
    """

    def __init__(self, bucket: Any, future: Any) -> None:
        self.parameters: list[Tensor] = []
        self._views: list[Tensor] = []
        self._buffer: Tensor = bucket.buffer()
        self._future = future

    def add(self, parameter: Tensor, view: Tensor) -> None:
        """One more, with the part of the bucket that is its own."""
        self.parameters.append(parameter)
        self._views.append(view)

    def keep(self, wanted: Callable[[Tensor], bool]) -> None:
        """Leave those that are not wanted to DDP."""
        pairs = zip(self.parameters, self._views, strict=True)
        kept = [(parameter, view) for parameter, view in pairs if wanted(parameter)]
        self.parameters = [parameter for parameter, _ in kept]
        self._views = [view for _, view in kept]

    def done(self) -> bool:
        """Whether waiting for it costs the host nothing."""
        return self._future.done()

    def give_gradients(self) -> None:
        """Wait, and give each parameter its gradient: a view of what the bucket became."""
        reduced = self._future.wait()
        start = reduced.storage_offset() - self._buffer.storage_offset()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            place = start + view.storage_offset()
            parameter.grad = reduced.as_strided(view.shape, view.stride(), place)


def announce(bucket: Any, future: Any) -> Any:
    """Tell those who have released gradients in a bucket that it is being reduced.

    Args:
        bucket: of DDP's communication hook.
        future: of what it becomes.

    Returns:
        ``future``.
    """
    found: dict[Any, Bucket] = {}
    for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
        reference = released.get(parameter)
        release = None if reference is None else reference()
        if release is not None:
            found.setdefault(release, Bucket(bucket, future)).add(parameter, view)
    for release, each in found.items():
        release.reduced(each)
    return future


def hook_holder(module: DistributedDataParallel) -> str | None:
    """Who has registered the one communication hook that a DDP module takes; None for nobody."""
    if getattr(module, "_torch_bf16_reduction", None) is not None:
        return "fp32 sums of micro-batches (accumulate='fp32'; 'bf16_stochastic' has none)"
    hooks = getattr(module, "_comm_hooks", None)
    if not hooks:
        return None
    hook = hooks[0][0]
    if hook is _reduce:
        return "released gradients (call release_gradients last)"
    if hook.__module__.startswith("torch_bf16."):
        return "reduce='bf16_wire'"
    return f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook).__name__)}"


def announce_buckets(module: DistributedDataParallel) -> str | None:
    """Let a DDP module announce its buckets; why it cannot, else."""
    if module.find_unused_parameters or module.static_graph:
        return (
            "DDP knows only at the end of a pass which gradients there are, as it finds unused ones"
        )
    if getattr(module, "mixed_precision", None) is not None:
        return "DDP casts gradients by its own mixed_precision"
    if getattr(module, "_torch_bf16_reduction", None) is not None:
        return "sums of micro-batches in fp32 bypass DDP's buckets; 'bf16_stochastic' does not"
    hooks = getattr(module, "_comm_hooks", None)
    if not hooks:
        module.register_comm_hook(module.process_group, _reduce)
    elif not any(each.__module__.startswith("torch_bf16.") for each, _ in hooks):
        return f"its DDP module has a communication hook already, that of {hook_holder(module)}"
    return None


# DDP compares annotations with its own types, and these are strings here.
def _reduce(state, bucket):
    """DDP's communication hook: its own reduction."""
    return announce(bucket, all_reduce_mean(bucket.buffer(), state))

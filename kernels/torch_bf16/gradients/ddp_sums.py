"""DDP: whether it reads sums of micro-batches, and how it reduces fp32 sums."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_bf16.parameters import parameters_in

from .backward import Passes
from .ddp_hook import Reducer, ddp_modules, hook_holder
from .hooked_parameters import weakly
from .reduce_scatter import all_reduce_mean

__all__ = ["DdpReader", "Fp32Reduction"]


class DdpReader:
    """Tracks whether a DDP module reads gradients as they arrive, as it does if this pass reduces.

    Attributes:
        over: whether a backward pass has ended since the last forward pass.
        hook: handle of the hook on the module.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._prepared = self.over = True
        self._module = weakref.ref(module)
        self.hook = module.register_forward_hook(self._after_forward)

    def __getstate__(self) -> dict[str, Any]:
        # A copied module has a copy of the hook, whose reader no sum asks.
        return {**vars(self), "_module": _no_module}

    @property
    def reads(self) -> bool:
        """Whether it does; True if that is not certain."""
        # A pipeline calls the forward pass in no_sync, and prepares the reducer afterwards.
        return self._prepared or getattr(self._module(), "require_backward_grad_sync", False)

    def _after_forward(self, module: Any, *_: Any) -> None:
        # With this flag the forward pass prepares the reducer; without it, as in no_sync, the
        # reducer stays prepared until a backward pass has ended.
        if module.require_forward_param_sync:
            self._prepared, self.over = True, False
        elif self.over:
            self._prepared = False


def _no_module() -> None:
    return None


class _Kept(dict[Any, Any]):
    """The fp32 gradients of one backward pass, by parameter, while DDP must not see them."""

    def put_back(self) -> None:
        """Put the gradients back into ``p.grad``."""
        for parameter, gradient in self.items():
            parameter.grad = gradient
        self.clear()

    # A pass that fails calls nothing else.
    __del__ = put_back


class Fp32Reduction(Reducer):
    """Reduces the fp32 gradients of one DDP module. Made by :meth:`of`.

    DDP refuses gradients whose dtype differs from the parameters'. So they are hidden from it: kept
    here while a backward pass runs, and reduced by a communication hook in place of DDP's bucket.
    """

    purpose = "fp32 sums of micro-batches (accumulate='fp32'; 'bf16_stochastic' has none)"

    def __init__(self, module: DistributedDataParallel) -> None:
        super().__init__(module)
        self._parameters = set(parameters_in(module))
        self._passes = Passes(_Kept, _Kept.put_back)

    @classmethod
    def of(cls, model: nn.Module) -> Fp32Reduction | None:
        """The reduction of the DDP module in ``model``, or None if there is no such module.

        Raises:
            ValueError: an option or a communication hook of the module prevents it.
        """
        modules = ddp_modules(model)
        if not modules:
            return None
        module, *more = modules
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
        reduction = cls.registered(module)
        if reduction is None and (holder := hook_holder(module)):
            why = f"its DDP module has a communication hook already, that of {holder}: leave it out"
        if why:
            raise ValueError(
                f"gradients cannot be accumulated in 'fp32': {why}, or accumulate in "
                "'bf16_stochastic'"
            )
        if reduction is None:
            reduction = cls(module)
            reduction.register(module)
        return reduction

    def hook(self, parameter: Tensor) -> list[Any]:
        """Keep this parameter's gradients here during backward; returns the hooks' handles."""
        if parameter not in self._parameters:
            return []
        return [parameter.register_post_accumulate_grad_hook(weakly(self._keep))]

    def _keep(self, parameter: Any) -> None:
        running = self._passes.current()
        # Kept already, if an optimizer that is gone has left a hook.
        if parameter.dtype != torch.bfloat16 or running is None or parameter.grad is None:
            return
        # An enclosing pass's gradient was hidden, so autograd has not added this one to it.
        for each in self._passes:
            if parameter in each:
                parameter.grad = each.pop(parameter) + parameter.grad
        running[parameter] = parameter.grad
        parameter.grad = None

    def reduce(self, bucket: Any) -> Any:
        """Begin to take the mean over all ranks, in fp32 if sums of the bucket's parameters are."""
        size, buffer = dist.get_world_size(self._group), bucket.buffer()
        sums: bool = any(each.grad_dtype == torch.float32 for each in bucket.parameters())
        if not sums or buffer.dtype != torch.bfloat16:
            return all_reduce_mean(buffer, self._group)
        for parameter in bucket.parameters():
            # A pass within this one, as under reentrant checkpointing, has put it back already.
            if parameter.grad is not None:
                self._keep(parameter)
        kept = {parameter: g for each in self._passes for parameter, g in each.items()}
        # DDP's own zeros for parameters that no micro-batch used, or on a rank that left by join().
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

"""The body of the precision plugins, written once for Fabric and Trainer of both packages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

import torch_bf16

from .fp32_results import to_fp32
from .gradients import GradientOptions

__all__ = ["PrecisionBody"]

_COMPUTE = ("autocast", "bf16")
_CAST = (
    "Nothing was trained, but the parameters of your module are bf16 by now: make or load it anew"
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision

    _Base = Any
else:
    _Base = object


class PrecisionBody(_Base):
    """What Fabric and Trainer have in common; stands in front of the host's precision classes.

    Args:
        recipe: name of a recipe or a :class:`torch_bf16.Recipe`.
        compute: ``"autocast"`` runs the forward pass in autocast over bf16 weights: inputs,
            buffers, losses and metrics stay fp32, and so do norms and softmax where torch's
            autocast says so. ``"bf16"`` is the lean option: floating-point inputs are cast to bf16
            and every operation runs in the dtype of what it is given; losses are then computed in
            bf16 unless the module upcasts its logits.
        weights: format of the weights; None for the recipe's, as for all that follow.
        exp_avg: format of first moments.
        exp_avg_sq: format of second moments.
        accumulate: format of the sum of gradients over ``accumulate_grad_batches``.
        keep_fp32: modules that stay in fp32, by pattern of their name or by class.
        seed: seed of the rounding noise, the same on every rank.
        release_gradients: take the step inside the backward pass, and free each gradient at once;
            on a single device, without accumulation and without ``gradient_clip_val``.
        release_max_norm: how gradients that are released are clipped; None does not clip.
        release_norm: ``"parameter"`` or ``"last_step"``, see
            :func:`torch_bf16.release_gradients`.
    """

    def __init__(
        self,
        recipe: str | torch_bf16.Recipe = "bf16-stochastic",
        *,
        compute: str = "autocast",
        weights: str | None = None,
        exp_avg: str | None = None,
        exp_avg_sq: str | None = None,
        accumulate: str | None = None,
        keep_fp32: Sequence[Any] = (),
        seed: int | None = None,
        release_gradients: bool = False,
        release_max_norm: float | None = None,
        release_norm: str = "parameter",
    ) -> None:
        super().__init__("bf16-true")
        if compute not in _COMPUTE:
            raise ValueError(f"compute={compute!r} is unknown; use one of {', '.join(_COMPUTE)}")
        given = {
            "weights": weights,
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
            "accumulate": accumulate,
            "seed": seed,
        }
        overrides: dict[str, Any] = {key: each for key, each in given.items() if each is not None}
        if keep_fp32:
            overrides["keep_fp32"] = keep_fp32 if isinstance(keep_fp32, str) else tuple(keep_fp32)
        self.recipe = torch_bf16.get_recipe(recipe, **overrides)
        self.compute = compute
        self.gradients = GradientOptions(release_gradients, release_max_norm, release_norm)
        self.gradients.check(self.recipe)
        self._modules: list[weakref.ref[Module]] = []

    @property
    def mode(self) -> str:
        """Name of the recipe; ``precision`` stays ``"bf16-true"``, which the hosts know."""
        return self.recipe.name

    # What the hosts call.

    def convert_module(self, module: Module) -> Module:
        """Cast the parameters to bf16, in place; buffers and metrics stay as they are."""
        torch_bf16.cast_module(module, self.recipe)
        self._modules = [ref for ref in self._modules if ref() not in (None, module)]
        self._modules.append(weakref.ref(module))
        return module

    @property
    def mixed_precision_config(self) -> MixedPrecision:
        """What FSDPStrategy hands to FSDP1: weights and buffers as they are, fp32 reduction."""
        from torch.distributed.fsdp import MixedPrecision  # a build of torch may lack it

        casts = self.compute == "bf16"
        return MixedPrecision(
            reduce_dtype=torch.float32,
            cast_forward_inputs=casts,
            cast_root_forward_inputs=casts,
        )

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Nothing: new tensors are fp32, the default dtype is never touched."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Nothing: weights are drawn in fp32, so that exact masters start from them."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast on the device of the module; nothing for ``compute="bf16"``."""
        if self.compute == "bf16":
            return nullcontext()
        # The cache holds casts of fp32 weights; there are none worth it, and it would keep stale
        # copies of the modules in keep_fp32.
        return torch.autocast(self._device_type(), dtype=torch.bfloat16, cache_enabled=False)

    def convert_input(self, data: Any) -> Any:
        """Inputs as they are; their floats in bf16 for ``compute="bf16"``."""
        return super().convert_input(data) if self.compute == "bf16" else data

    def convert_output(self, data: Any) -> Any:
        """bf16 outputs in fp32."""
        return to_fp32(data)

    def state_dict(self) -> dict[str, Any]:
        """What this plugin is; the numbers are all in the optimizers' state."""
        return {"mode": self.mode, "seed": self.recipe.seed, "compute": self.compute}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the seed over; the optimizers do so too, and check the recipe."""
        if "seed" in state_dict:
            self.recipe = torch_bf16.get_recipe(self.recipe, seed=state_dict["seed"])

    def __getstate__(self) -> dict[str, Any]:
        # A spawned process converts its own copy of the module.
        return {**self.__dict__, "_modules": []}

    # What _host.py and the Trainer's connect call.

    def convert_optimizers(
        self, optimizers: Iterable[Any], is_placeholder: Callable[[Any], bool] | None = None
    ) -> list[torch_bf16.BF16Optimizer]:
        """Convert the torch optimizers among ``optimizers`` in place.

        Returns:
            Those that were converted by this call.

        Raises:
            NotImplementedError: one of them cannot be converted; the modules are cast already.
            ValueError: likewise, because of a parameter or an option of it.
        """
        converted: list[Any] = []
        for wrapped in optimizers:
            optimizer = unwrapped(wrapped)
            if not isinstance(optimizer, torch.optim.Optimizer):
                continue  # an object with its own step, which the hosts allow
            if is_placeholder is not None and is_placeholder(optimizer):
                continue
            # ZeroRedundancyOptimizer's local optimizer takes the steps.
            local = getattr(optimizer, "optim", optimizer)
            if not isinstance(local, torch_bf16.BF16Optimizer):
                try:
                    torch_bf16.convert(optimizer, self.recipe, module=self._owner(optimizer))
                except (NotImplementedError, ValueError) as error:
                    raise type(error)(f"{error}. {_CAST}") from error
                if isinstance(optimizer, torch_bf16.BF16Optimizer):
                    converted.append(optimizer)
        return converted

    def clip_in_place(
        self, optimizer: Any, limit: float, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale this optimizer's gradients to an fp32 norm of at most ``limit``.

        Returns:
            The norm they had.

        Raises:
            RuntimeError: it is not finite and ``error_if_nonfinite``; nothing was scaled.
        """
        return torch_bf16.clip_grad_norm_(
            list(self.main_params(optimizer)), limit, error_if_nonfinite=error_if_nonfinite
        )

    def announce(self, optimizers: Sequence[torch_bf16.BF16Optimizer]) -> None:
        """Say in one line what is trained how."""
        if not optimizers:
            return
        module = self._owner(optimizers[0])
        if module is not None:
            rank_zero_info(torch_bf16.describe(module, optimizers[0]))

    def attach(self, module: Module, optimizers: Iterable[Any]) -> None:
        """Let gradients be summed or released as asked, now that a module is wrapped.

        Args:
            module: as the strategy wrapped it.
            optimizers: those of its parameters; others are passed over.

        Raises:
            NotImplementedError: gradients cannot be released there.
            ValueError: they cannot be summed there in that format.
        """
        for wrapped in optimizers:
            optimizer = unwrapped(wrapped)
            if isinstance(optimizer, torch_bf16.BF16Optimizer):
                self.gradients.attach(module, optimizer)

    def sync_replicas(self, module: Module, equal: bool = False) -> None:
        """Let exact masters start from rank 0's, as DDP does with the weights it can see.

        Args:
            module: as the strategy wrapped it.
            equal: whether FSDP1 has done the same.
        """
        module = getattr(module, "_orig_mod", module)
        if equal:
            torch_bf16.sync_masters(module)
        if isinstance(module, DistributedDataParallel):
            torch_bf16.sync_masters(module.module, group=module.process_group)

    def _owner(self, optimizer: torch.optim.Optimizer) -> Module | None:
        """The module that has all the parameters of an optimizer, if it was converted here."""
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        for module in self._live_modules():
            if trained <= set(module.parameters()):
                return module
        return None

    def _live_modules(self) -> list[Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    def _device_type(self) -> str:
        for module in reversed(self._live_modules()):
            for parameter in module.parameters():
                return parameter.device.type
        return "cuda" if torch.cuda.is_available() else "cpu"


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside LightningOptimizer and Fabric's wrapper, which only proxy reads."""
    return getattr(optimizer, "_optimizer", optimizer)

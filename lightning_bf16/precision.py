"""What our precision plugins share: one mixin for Fabric and Trainer of both packages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn import Module, ParameterList

import torch_bf16
from torch_bf16 import plugin_api

from . import _patches
from ._patches.private_attributes import syncs_module_states

__all__ = ["PrecisionMixin"]

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision

    _Base = Any
else:
    _Base = object


class PrecisionMixin(_Base):
    """Train in bf16 and end up where fp32 would have.

    ``Trainer(precision="bf16-stochastic")`` and ``Fabric(precision="bf16-stochastic")`` create this
    plugin; create it yourself to set its options.

    If ``recipe`` is a name, options that are not set here come from environment variables
    (``BF16_WEIGHTS`` and so on); a :class:`torch_bf16.Recipe` is used as it is.

    Args:
        recipe: ``"bf16-stochastic"``, ``"bf16-fp32-master"`` or a :class:`torch_bf16.Recipe`.
        compute: ``"autocast"`` runs the forward pass in autocast over bf16 weights: inputs,
            buffers, losses and metrics stay fp32, and so do norms and softmax where torch's
            autocast says so. ``"fp32"`` computes everything in fp32 over the same bf16 weights, for
            CPUs whose bf16 products are slow. ``"bf16"`` is the lean option: floating-point inputs
            are cast to bf16 and every operation runs in the dtype of its inputs; losses are then
            computed in bf16 unless the module upcasts its logits. None uses the recipe's setting
            (by default ``"autocast"``); the same holds for the options below.
        weights: format of the weights.
        exp_avg: format of first moments.
        exp_avg_sq: format of second moments.
        accumulate: format of the sum of gradients over ``accumulate_grad_batches``.
        reduce: ``"bf16_wire"`` lets DDP and FSDP send gradients in bf16 and sum them in fp32; see
            :func:`torch_bf16.reduce_gradients`.
        offload: ``"states"`` keeps moments and masters in host memory.
        keep_fp32: modules that stay in fp32, by name pattern or by class.
        seed: seed of the rounding noise, the same on every rank.
        backend: what computes the steps, ``"cpu"``, ``"triton"`` or ``"eager"``; None picks the
            best that works.
        vectors: ``"like_matrices"`` keeps one-dimensional parameters in the formats of matrices,
            which DeepSpeed may need.
        release_gradients: take the step inside the backward pass, and free each gradient at once;
            cannot be combined with ``gradient_clip_val``.
        release_max_norm: maximum norm that released gradients are clipped to; None does not clip.
        release_norm: ``"parameter"`` or ``"last_step"``, see
            :func:`torch_bf16.release_gradients`.
        release_accumulation_steps: number of backward passes per released step; None is the
            Trainer's ``accumulate_grad_batches``, and 1 in Fabric.

    Example:
        >>> plugin = BF16Precision("bf16-fp32-master", keep_fp32=["head"])
        >>> trainer = Trainer(plugins=[plugin])
    """

    # Precedes the precision classes of Fabric or of a Trainer in the bases.

    _advice = "Give it to fabric.setup or fabric.setup_optimizers"
    _place = "fabric.strategy.precision"  # where programs find the plugin

    def __init__(
        self,
        recipe: str | torch_bf16.Recipe = "bf16-stochastic",
        *,
        compute: str | None = None,
        weights: str | None = None,
        exp_avg: str | None = None,
        exp_avg_sq: str | None = None,
        accumulate: str | None = None,
        reduce: str | None = None,
        offload: str | None = None,
        keep_fp32: Sequence[Any] | None = None,
        seed: int | None = None,
        backend: str | None = None,
        vectors: str | None = None,
        release_gradients: bool | None = None,
        release_max_norm: float | None = None,
        release_norm: str | None = None,
        release_accumulation_steps: int | None = None,
    ) -> None:
        arguments = dict(locals())
        super().__init__("bf16-true")
        options = plugin_api.options_from_environment() if isinstance(recipe, str) else {}
        for name in ("self", "recipe", "__class__"):
            arguments.pop(name, None)
        options |= {name: value for name, value in arguments.items() if value is not None}
        self.release = plugin_api.release_options(options)
        self.recipe = torch_bf16.get_recipe(recipe, **options)
        self.release_accumulation_steps = release_accumulation_steps
        self._modules: list[weakref.ref[Module]] = []
        self._matched: set[str | type] = set()  # entries of keep_fp32 that a module has had

    @property
    def mode(self) -> str:
        """Name of the recipe; ``precision`` stays ``"bf16-true"``, which the hosts know."""
        return self.recipe.name

    @property
    def compute(self) -> str:
        """What the forward pass computes in, by the recipe."""
        return self.recipe.compute

    # Methods that the hosts call.

    def convert_module(self, module: Module) -> Module:
        """Cast the parameters to bf16, in place; buffers and metrics keep their dtypes."""
        self.cast(module)
        self.carry_autocast(module)
        # Each time: a cast has set a watch of its own in the place of the last one.
        _patches.patches.keep(plugin_api.warn_unconverted(module, self._advice), module)
        self._modules = [ref for ref in self._modules if ref() not in (None, module)]
        self._modules.append(weakref.ref(module))
        return module

    def cast(self, module: Module) -> None:
        """Cast the parameters: the first half of :meth:`convert_module`."""
        torch_bf16.cast_model(module, self.recipe_for(module))

    def recipe_for(self, module: Module) -> torch_bf16.Recipe:
        """The recipe without entries of ``keep_fp32`` that only other modules match.

        Raises:
            ValueError: an entry matches nothing here, nor in a module that was set up before.
        """
        plugin_api.refuse_unmatched(module, self.recipe, self._matched)
        keep = plugin_api.matched_patterns(module, self.recipe)
        self._matched.update(keep)
        return torch_bf16.get_recipe(self.recipe, keep_fp32=keep)

    def carry_autocast(self, module: Module) -> None:
        """Let a cast module run under autocast wherever it is called."""
        torch_bf16.carry_autocast(module, compute=self.compute)

    @property
    def mixed_precision_config(self) -> MixedPrecision:
        """The settings that FSDPStrategy passes to FSDP1: reduce in fp32, cast nothing else."""
        from torch.distributed.fsdp import MixedPrecision  # a build of torch may lack it

        casts = self.compute == "bf16"
        return MixedPrecision(
            reduce_dtype=torch.float32, cast_forward_inputs=casts, cast_root_forward_inputs=casts
        )

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """An empty context: the default dtype stays fp32, so exact masters start from fp32."""
        return nullcontext()

    module_init_context = tensor_init_context

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of :func:`torch_bf16.arithmetic` for the module's device."""
        return torch_bf16.arithmetic(self._device_type(), self.compute)

    def convert_input(self, data: Any) -> Any:
        """Inputs unchanged, or with floats cast to bf16 if ``compute`` is ``"bf16"``."""
        return super().convert_input(data) if self.compute == "bf16" else data

    def convert_output(self, data: Any) -> Any:
        """Outputs with bf16 tensors in fp32."""
        return plugin_api.widen_tensors(data)

    def state_dict(self) -> dict[str, Any]:
        """The plugin's settings; all numbers are in the optimizers' state."""
        return {"mode": self.mode, "seed": self.recipe.seed, "compute": self.compute}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adopt the saved seed; the optimizers do the same, and check the recipe."""
        seed = state_dict.get("seed", self.recipe.seed)
        if seed != self.recipe.seed:
            rank_zero_info(
                f"{self.mode}: seed={seed} of the checkpoint takes the place of "
                f"seed={self.recipe.seed}, so that training continues with the same noise"
            )
            self.recipe = torch_bf16.get_recipe(self.recipe, seed=seed)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned process converts its own copy of the module.
        return {**self.__dict__, "_modules": []}

    # Methods that the Trainer's connect and the patches of Fabric call.

    def convert_optimizers(self, optimizers: Iterable[Any], module: Module | None = None) -> None:
        """Convert the torch optimizers among ``optimizers`` in place.

        Args:
            optimizers: the optimizers that the host got, or objects that stand in for one.
            module: the module that owns their parameters, if it is not cast yet; it is cast, too.

        Raises:
            NotImplementedError, ValueError: an optimizer cannot be converted, or was made with
                another recipe; ``module`` is unchanged.
        """
        optimizers = [*optimizers]
        # The hosts allow any object with a step method.
        unconverted: list[Any] = [
            each
            for each in optimizers
            if isinstance(each, torch.optim.Optimizer)
            and not isinstance(each, torch_bf16.BF16Optimizer)
            # An optimizer of complex parameters only, for example, or the placeholder of a Trainer
            # without one, has nothing to train in bf16.
            and any(p.is_floating_point() for p in plugin_api.parameters_of(each))
        ]
        try:
            for each in chain.from_iterable(map(plugin_api.held_optimizers, optimizers)):
                self._refuse_another_recipe(each)
            own = [each for each in unconverted if module is not None and _owns(module, each)]
            owned = [(each, self._owner(each)) for each in unconverted if each not in own]
            others = [
                (each, self.recipe if owner is None else self.recipe_for(owner), owner)
                for each, owner in owned
            ]
            # All are asked before one is changed.
            plugin_api.refuse_unconvertible(others)
            if module is not None:
                recipe = self.recipe_for(module)
                plugin_api.refuse_uncastable(module, recipe)
                if own:
                    torch_bf16.prepare(module, own, recipe)
            for each, recipe, owner in others:
                torch_bf16.convert(each, recipe, model=owner)
        except (NotImplementedError, ValueError) as error:
            cast = any(
                p.dtype == torch.bfloat16
                for each in optimizers
                for p in plugin_api.parameters_of(each)
            )
            # A ValueError is about an option, of the plugin or the optimizer, and says what works.
            unchanged = (
                ". With precision='32-true' or 'bf16-mixed' Lightning uses it unchanged"
                * isinstance(error, NotImplementedError)
            )
            # Of what that call was given; the module is another matter.
            said = str(error).removesuffix(". Nothing was changed")
            raise type(error)(
                f"precision={self.mode!r}: {said}{unchanged}. Nothing was trained"
                + ", but the parameters of your module are bf16 by now: create or load it again"
                * cast
            ) from error

    def announce(self, optimizers: Iterable[Any]) -> None:
        """Log a line for each optimizer of ours that says what it trains and how.

        One that trains no converted module yet gets its line when Fabric sets one up.
        """
        ours = [*chain(*map(plugin_api.held_optimizers, optimizers))]
        for optimizer in ours:
            own = plugin_api.parameters_of(optimizer)
            live = self._live_modules()
            modules = [m for m in live if not {*own}.isdisjoint(plugin_api.parameters_in(m))]
            if modules:
                # Of several, each counts its own parameters; one counts the frozen ones, too.
                described = [ParameterList(own)] if len(ours) > 1 else modules
                # An optimizer of the user's knows nothing of what the plugin computes in.
                found = replace(torch_bf16.describe(described, optimizer), compute=self.compute)
                rank_zero_info(str(found))

    def setup_gradients(self, module: Module, optimizers: Iterable[Any]) -> None:
        """Set up reduction, accumulation and release of a module's gradients, once it is wrapped.

        Args:
            module: the module as wrapped by the strategy.
            optimizers: its optimizers; releases by earlier optimizers of the same parameters end.
        """
        ours = [each for each in optimizers if plugin_api.held_optimizers(each)]
        plugin_api.end_releases(chain(*map(plugin_api.parameters_of, ours)), keep=ours)
        release = self.release
        if release is not None:
            release = replace(release, accumulation_steps=self.accumulation_steps())
        for optimizer in ours:
            torch_bf16.setup_gradients(module, optimizer, release)

    def refuse_released(self, optimizer: Any) -> None:
        """Refuse to clip gradients that this plugin has released, and name its options that do.

        Raises:
            NotImplementedError: the optimizer's gradients are gone.
        """
        if self.release is not None:
            plugin_api.refuse_released(
                self.main_params(optimizer),
                "Clip with BF16Precision(release_gradients=True, release_max_norm=..., "
                "release_norm='parameter' or 'last_step') instead of here",
            )

    def accumulation_steps(self) -> int:
        """The number of backward passes per released step."""
        return self.release_accumulation_steps or 1

    def sync_masters(self, module: Module, strategy: Any) -> None:
        """Start a wrapped module's exact masters from rank 0's, like its weights."""
        plugin_api.sync_wrapped_masters(module, syncs_module_states(strategy))

    def _owner(self, optimizer: torch.optim.Optimizer) -> Module | None:
        """The module, converted here, that has all parameters of an optimizer, or None."""
        return next((each for each in self._live_modules() if _owns(each, optimizer)), None)

    def _refuse_another_recipe(self, optimizer: torch_bf16.BF16Optimizer) -> None:
        """Raise ValueError if an optimizer was made with another recipe than the plugin casts by.

        Its exact masters would start from rounded weights, or options of the plugin would be lost.
        """
        own, asked = optimizer.recipe, self.recipe
        # A checkpoint may have brought another seed, and to what is fp32 no format applies.
        keep = asked.keep_fp32 if {*own.keep_fp32} <= {*asked.keep_fp32} else own.keep_fp32
        alike = torch_bf16.get_recipe(own, name=asked.name, seed=asked.seed, keep_fp32=keep)
        if alike != asked:
            differing = ", ".join(
                f"{each.name} is {theirs!r} there and {ours!r} here"
                for each in fields(asked)
                if (theirs := getattr(alike, each.name)) != (ours := getattr(asked, each.name))
                and each.compare
            )
            raise ValueError(
                f"this {type(optimizer).__name__} was made with recipe {own.label!r}, and the "
                f"plugin casts the module by {asked.label!r}: {differing}. Use one recipe for "
                f"both: make the optimizer with recipe={self._place}.recipe, or of torch.optim, "
                "which is converted; or give the plugin the optimizer's, BF16Precision(recipe)"
            )

    def _live_modules(self) -> list[Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    def _device_type(self) -> str:
        for module in reversed(self._live_modules()):
            for parameter in plugin_api.parameters_in(module):
                return parameter.device.type
        return "cuda" if torch.cuda.is_available() else "cpu"


def _owns(module: Module, optimizer: torch.optim.Optimizer) -> bool:
    return set(plugin_api.parameters_of(optimizer)) <= set(plugin_api.parameters_in(module))

"""The base class of all our optimizers: the step, its options, and the state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_bf16.argument_checks import check_backend
from torch_bf16.backends import StepInputs, cuda_graphs
from torch_bf16.engine.direction import Direction
from torch_bf16.engine.engine import Engine, Observer, engine_of
from torch_bf16.engine.member import Member
from torch_bf16.engine.pending import TOO_LATE_TO_SKIP, check_capturable
from torch_bf16.engine.plan import Plan
from torch_bf16.engine.setting import Setting
from torch_bf16.engine.states import States, set_seen
from torch_bf16.errors import UNTOUCHED, Label, suffix_errors, unchanged_by_errors
from torch_bf16.gradients.accumulation import accumulate_as
from torch_bf16.gradients.release import release_as
from torch_bf16.model import blended_weights
from torch_bf16.recipe import Recipe, get_recipe
from torch_bf16.rules import Rule
from torch_bf16.sharding import Shard
from torch_bf16.states.completion import complete_state
from torch_bf16.states.recoding import Changes

from . import averaged_replicas, exact_weights, inherited_masters, loading, saving, shared_states
from .graphed import GraphedStep
from .overwritten import drop_remainders, look_for_writes, states_without_remainders
from .planning import check_recipe, make_plan, name_late_fp32, with_gradients
from .replaced import check_in_model
from .step_hooks import hooked
from .validation import FULLY_DECOUPLED, check_group, check_options, resolve_peak_lr
from .variants import NONE, VARIANTS, check_variant, variant_of

__all__ = ["BF16Optimizer"]


class BF16Optimizer(torch.optim.Optimizer):
    """Base class of the optimizers that store their numbers by a recipe.

    Do not instantiate it: use :class:`AdamW`, say, or :func:`convert`. Where torch has the
    optimizer, this is a mixin before the ``torch.optim`` class, whose constructor, groups and hooks
    stay as they are. One call updates a batch of tensors. Gradients are read, never written.

    Attributes:
        recipe: how numbers are stored; loading a state dict adopts the saved noise seed.
        backend: its name, at first the recipe's; None for the environment's, else the best one.
        observers: notified before and after each update; copies of the optimizer have none.
    """

    torch_class: ClassVar[type[torch.optim.Optimizer]]
    decouples: ClassVar[bool] = False  # whether weight decay acts on the weights by default
    variants: ClassVar[Mapping[str, Rule]] = NONE
    _rule: ClassVar[Rule]  # of every group without a variant, unless rule_of_group() is overridden
    family: ClassVar[str | None] = None  # see schema.check_family
    # GradScaler leaves unscaling to the step, which reads the grad_scale and found_inf it sets.
    _step_supports_amp_scaling: ClassVar[bool] = True

    recipe: Recipe
    backend: str | None
    observers: list[Observer]
    _engine_class: ClassVar[type[Engine]] = Engine
    _engine: Engine

    def _construct(self, arguments: dict[str, Any], *, defaults: bool = False) -> None:
        """Run torch's constructor, then set up what torch does not have.

        Args:
            arguments: ``locals()`` of a constructor: torch's arguments and ours.
            defaults: whether torch's arguments are default options, as no torch class takes them.
        """
        ours = {"recipe", "backend", "release", FULLY_DECOUPLED, *VARIANTS} & arguments.keys()
        options = {k: v for k, v in arguments.items() if k not in {"self", *ours}}
        # They are ignored, but torch refuses them beside others and for some parameters.
        ignored = {k: v for k in ("foreach", "fused") if (v := options.pop(k, None)) is not None}
        if defaults:
            torch.optim.Optimizer.__init__(self, options.pop("params"), options)
        else:
            super().__init__(**options)
        for each in (self.defaults, *self.param_groups):
            each.update({k: v for k, v in ignored.items() if each[k] is None})
        self._setup(**{name: arguments[name] for name in ours})

    def _setup(
        self,
        recipe: str | Recipe,
        backend: str | None = None,
        *,
        release: bool | Mapping[str, Any] = False,
        **options: Any,
    ) -> None:
        """Set up what torch's constructor has left out; ``options`` are defaults of groups."""
        options = {name: value for name, value in options.items() if value}
        self.defaults.update(options)
        for number, group in enumerate(self.param_groups):
            group.update({**options, **group})
            self._check_options(group, number)
            resolve_peak_lr(group, number, self.decouples_decay(group))
        self.state = States(dict, self.state)
        self.recipe = get_recipe(recipe)
        check_backend(backend)
        self.backend = self.recipe.backend if backend is None else backend
        self.observers = []
        self._engine = self._engine_class()
        check_recipe(self)
        shared_states.follow_sharers()
        averaged_replicas.average_exactly()
        release_as(release, self)
        accumulate_as(self.recipe, self)
        inherited_masters.inherit(self)

    def rule_of_group(self, group: dict[str, Any]) -> Rule:
        """The update rule of a parameter group."""
        return variant_of(group, self.variants) or self._rule

    def rule_of_parameter(self, group: dict[str, Any], parameter: Tensor) -> Rule:
        """The update rule of a parameter; overridden if it depends on the shape."""
        return self.rule_of_group(group)

    def direction_of(self, member: Member) -> Direction:
        """Make what computes the direction of a parameter's step from its whole gradient.

        Called once per plan, if the rule has ``stage_states``.

        Args:
            member: the parameter, dense and with its state complete.
        """
        raise NotImplementedError

    def decouples_decay(self, group: dict[str, Any]) -> bool:
        """Whether a group's weight decay acts on the weights, not through the gradient."""
        return group.get("decoupled_weight_decay", self.decouples)

    # A traced step would have no addresses for kernels, and would ignore hooks added later.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
    @hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Take one step for every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned, else None.

        Raises:
            ValueError: a gradient is sparse, or neither bf16, fp32 nor complex64.
            StateMismatchError: a parameter was moved, recast or replaced since its state was made.
            RuntimeError: a CUDA graph is being captured whose replays would not be valid steps.
            In these cases nothing has been updated. Any other error ends with how many parameters
            were updated; only their steps are counted.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        engine = self._engine
        engine.select(self.param_groups)
        self._check_step()
        blended_weights.warn_if_blended(self)
        setting, inputs = self._setting(), StepInputs()
        if engine.release is not None:
            if not engine.release.finish(with_gradients(setting.parameters)):
                check_in_model(self)
        else:
            inputs = engine.pending.inputs(self, setting.parameters)
            with torch.set_grad_enabled(False):  # half the time of no_grad()
                engine.plan = self._update(setting.parameters, engine.plan, setting, inputs)
            engine.last_norm = None
        self._count(inputs)
        engine.pending.note_step()
        return loss

    def _count(self, inputs: StepInputs) -> None:
        """Update the counters after a step that was taken or skipped."""
        self._engine.count(inputs)

    def _update(
        self, parameters: list[Tensor], plan: Plan | None, setting: Setting, inputs: StepInputs
    ) -> Plan | None:
        """Step what has a gradient, and return the next plan; the caller switches grad mode off."""
        fits = plan is not None and plan.fits(setting, parameters, self.state)
        parameters = parameters if fits else with_gradients(parameters)
        devices = (each.device for each in parameters) if plan is None else plan.devices
        if capturing := cuda_graphs.capturing(devices):
            obstacle = plan.obstacle_to_capture() if plan is not None and fits else None
            check_capturable(self, fits, obstacle)
        with suffix_errors(UNTOUCHED):
            if plan is None or not fits:
                plan = make_plan(self, parameters, setting, plan)
            if capturing:
                # The graph reads the plan's tables as long as it lives.
                self._engine.captured.add(plan)
            if not plan.active_parameters():
                check_in_model(self)
            drop_remainders(self, parameters, plan.overwritten_members)
            for observer in self.observers:
                set_seen(self.state, True)
                observer.before_update(plan.active_members(), inputs)
            # All scalars first: a bad hyperparameter must raise before anything is updated.
            scalars = plan.scalars(self.param_groups, inputs)
        try:
            if scalars is not None:
                plan.run(scalars, inputs)
        finally:
            # After an interrupt, too: the step's own writes must not count as foreign ones.
            plan.note_step()
        for observer in self.observers:
            observer.after_update()
        return plan

    def graphed(self, *, check_every: int = 1) -> GraphedStep:
        """Capture a step in a CUDA graph without taking it; return a callable that replays it.

        Args:
            check_every: number of replays from one check of all gradients and weights to the next.

        Raises:
            RuntimeError: no graph can hold the step; see :class:`.graphed.GraphedStep`.
        """
        return GraphedStep(self, check_every)

    def exact_weight(self, parameter: Tensor) -> Tensor:
        """The numbers that a parameter's next step starts from, without rounding to bf16.

        Args:
            parameter: one of this optimizer's parameters, which is not checked.

        Returns:
            A new fp32 tensor; of an fp32 or complex64 parameter the parameter itself, detached.
        """
        return exact_weights.read(self, parameter)

    @torch.no_grad()
    def set_exact_weight(self, parameter: Tensor, value: Tensor) -> None:
        """Let the next step start from other fp32 numbers: an average over replicas, say.

        Writes the parameter and what its format keeps beside it; moments do not change.

        Args:
            parameter: one of this optimizer's parameters; modified in place.
            value: fp32, with the shape and placement of :meth:`exact_weight`; not kept. A format
                without an exact master rounds it stochastically, to the same bits on all replicas.

        Raises:
            ValueError: the parameter is in no group, or ``value`` has another shape or dtype;
                nothing has been changed.

        Example:
            >>> weight = optimizer.exact_weight(model.weight)
            >>> optimizer.set_exact_weight(model.weight, 0.5 * weight)
        """
        exact_weights.find_and_write(self, parameter, value)

    def scale_next_step(self, coefficient: float | Tensor) -> None:
        """Multiply every gradient by ``coefficient`` in the next step only.

        A second call replaces the first one; ``zero_grad`` and ``step`` reset the coefficient to 1.
        So clipping by norm needs no pass over the gradients, which stay as they are.

        Args:
            coefficient: a finite number or a 0-d tensor.

        Raises:
            ValueError: it is neither.
            NotImplementedError: gradients are released: the step is over already.
        """
        self._engine.requests_for_next_step(
            "nothing that is known only after it can scale them. To clip, call release_gradients("
            "model, optimizer, max_norm=..., norm='parameter' or 'last_step')"
        ).scale(coefficient)

    def skip_next_step_where(self, found_inf: Tensor) -> None:
        """Skip the next step if ``found_inf`` is not 0 by then.

        Weights, states and step counts then keep their bits; :attr:`skipped_steps` grows by one.
        With Triton the host does not wait for it. ``zero_grad`` and ``step`` cancel the request,
        and a second call replaces it.

        Args:
            found_inf: tensor with one element.

        Raises:
            ValueError: ``found_inf`` is anything else.
            NotImplementedError: gradients are released: the step is over already.
        """
        self._engine.requests_for_next_step(TOO_LATE_TO_SKIP).skip_where(found_inf)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped since the optimizer was made or loaded; reading it waits for the device."""
        return self._engine.pending.skipped_steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as in torch, and cancel requests to scale or skip the next step."""
        self._engine.discard()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.

        Raises:
            ValueError: a parameter's dtype cannot be trained by these optimizers.
            NotImplementedError: an option of the group is not supported.
        """
        with unchanged_by_errors(self.param_groups, param_group):
            super().add_param_group(param_group)
            self._check_group(self.param_groups[-1], len(self.param_groups) - 1)
            # torch's constructor adds the first groups, before there is an engine.
            if (engine := engine_of(self)) is not None:
                engine.hook_parameters()
                engine.setting = None
                name_late_fp32(self)

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict with one more entry, ``"torch_bf16"``: schema and recipe.

        States of parameters that FSDP1 has flattened are all fp32 there: FSDP1 gathers the states
        of a unit only if they have one dtype and the same names.
        """
        return saving.save(self, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of any recipe, or of the ``torch.optim`` class that this one replaces.

        States that were saved with the same recipe keep their bits and dtypes; torch would cast
        them to the parameter's dtype. Others are rounded once into the formats of this optimizer's
        recipe, and a warning says in which states this changed how many numbers.
        An exact master that was not saved starts from the weights that ``cast_model`` saw.
        Tensors are copied, unless they already belong to this optimizer, and the saved noise seed
        is adopted, so that a resumed run repeats the uninterrupted one bit for bit.
        Load the model's weights first: a saved master holds only the bits that its weight lacks.

        Raises:
            StateMismatchError: shapes, masters or meanings do not fit, or something is missing or
                damaged; nothing has been changed.
            ValueError: the number of groups or parameters differs, as in torch.
            NotImplementedError: a saved option is not supported, or not beside this optimizer's.
        """
        loading.load(self, state_dict, super().load_state_dict)

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise, without loading anything.

        Only one parameter's states are copied at a time. Load hooks are not run.
        """
        loading.check(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        own = {"recipe": self.recipe, "backend": self.backend, "_engine": copy(self._engine)}
        return super().__getstate__() | own | {"state": states_without_remainders(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's classes look for a step in each entry: a frozen weight's has none, nor a user's.
        super().__setstate__({**state, "state": States(dict)})
        states = state["state"]
        self.state = states if isinstance(states, States) else States(dict, states)
        if "_engine" in state:  # of a copy; else torch calls this for a state dict
            self.observers = []
            look_for_writes(self)
            inherited_masters.register(self)
            release_as(self._engine.release_options, self)
            accumulate_as(self.recipe, self)

    def label(self, group: int, position: int) -> str:
        """A parameter as messages describe it: its name if known, its place, shape and dtype."""
        return self._engine.names.label(self.param_groups, group, position)

    def _check_group(self, group: dict[str, Any], number: int) -> None:
        """Check a group that is being added, before any hook is registered."""
        self._check_options(group, number)
        check_group(group, number)
        resolve_peak_lr(group, number, self.decouples_decay(group))

    def _check_options(self, group: Mapping[str, Any], number: int) -> None:
        """Refuse options that no rule supports."""
        check_options(group, number)
        check_variant(group, number, self.variants, type(self).__name__)

    def _complete(
        self, state: Mapping[str, Any], shard: Shard, group: Any, label: Label, changes: Changes
    ) -> dict[str, Any]:
        """A parameter's state as this optimizer keeps it; see :func:`.complete_state`."""
        rule = self.rule_of_parameter(group, shard.parameter)
        return complete_state(state, shard, rule, self.recipe, label, changes)

    def _check_step(self) -> None:
        """Refuse a step with options that no rule supports; also if gradients are released."""
        with suffix_errors(UNTOUCHED):
            for number, group in enumerate(self.param_groups):
                self._check_options(group, number)
                if group.get(FULLY_DECOUPLED):
                    resolve_peak_lr(group, number, self.decouples_decay(group))

    def _setting(self) -> Setting:
        """The current setting: the same object for as long as nothing in it changes."""
        fixed = self.recipe, self.backend, [*map(self.rule_of_group, self.param_groups)]
        return self._engine.settle(fixed, self.param_groups)

"""Replacements for methods of ``Accelerator``: preparing, logging, saving."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableSet
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate_bf16 import refusals
from accelerate_bf16.modes import MODES, ModeName, canonical, mode_of, named_mode
from bf16_autoload import Patches

from .deepspeed import attach, schedulers, uses_deepspeed
from .fsdp import separate_groups
from .properties import replace_property
from .state import creating
from .unregistered import LIVING

__all__ = [
    "add_mixed_precision",
    "autocast",
    "get_state_dict",
    "init",
    "load_state",
    "log",
    "prepare",
    "prepare_model",
    "prepare_optimizer",
    "save_averages",
    "without_deepspeed",
]

if TYPE_CHECKING:
    from accelerate_bf16.preparation import Preparation

_current: Preparation | None = None
"""The running call of ``prepare``, inside which other methods of ``Accelerator`` are called."""


def _in_our_modes(
    replacement: Callable[..., Any], *, under_deepspeed: bool = True
) -> Callable[[Any], Any]:
    """Call ``replacement(original, accelerator, mode, ...)`` in our modes, else the original."""

    def make(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            mode = _current.mode if _current is not None else mode_of(self)
            if mode is None or (not under_deepspeed and uses_deepspeed(self)):
                return original(self, *args, **kwargs)
            return replacement(original, self, mode, *args, **kwargs)

        return method

    return make


# DeepSpeed itself casts the model and clips.
without_deepspeed = functools.partial(_in_our_modes, under_deepspeed=False)


def init(original: Any) -> Any:
    """Store the mode, and :class:`BF16RecipeKwargs`, which is taken out of the handlers."""
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from accelerate.state import AcceleratorState

        bound = signature.bind(self, *args, **kwargs)
        handlers = list(bound.arguments.get("kwargs_handlers") or ())
        # Whoever has a handler has imported its module, and with it the core.
        ours = sys.modules.get("accelerate_bf16.recipe_options")
        options = [e for e in handlers if ours and isinstance(e, ours.BF16RecipeKwargs)]
        if len(options) > 1:
            raise ValueError("one BF16RecipeKwargs can be passed in kwargs_handlers, not several")
        if options:
            bound.arguments["kwargs_handlers"] = [e for e in handlers if e not in options]
        first = not AcceleratorState._shared_state
        with creating():
            original(*bound.args, **bound.kwargs)
        found = self._bf16_named_mode = self.state._mixed_precision
        if canonical(found):
            LIVING.add(self)
        if options:
            if canonical(found) is None:
                if first:
                    # Else the process would be bound to this mode, and refuse the corrected call.
                    AcceleratorState._reset_state()
                raise ValueError(
                    f"BF16RecipeKwargs has no effect with mixed_precision={found!r}; use one of "
                    f"{', '.join(MODES)}"
                )
            self._bf16_recipe_options = options[0]

    return __init__


def add_mixed_precision(module: Any, patches: Patches) -> None:
    """Let the mode's name equal "bf16" when scripts compare it, until all is put back."""
    from yaml.representer import Representer, SafeRepresenter

    def make(stock: Any) -> Any:
        def mixed_precision(self: Any) -> Any:
            if _current is None:
                # Under DeepSpeed Accelerate says "bf16", as its configuration does.
                if mode := mode_of(self):
                    return ModeName(mode)
                if canonical(self.state._mixed_precision):  # of another Accelerator
                    return named_mode(self)
            return stock(self)

        return mixed_precision

    # Accelerate's tracker for TensorBoard writes what a script configures as YAML.
    for each in _tables_of(SafeRepresenter, Representer):
        patches.add(each, ModeName, lambda dumper, name: dumper.represent_str(str(name)))

    if replace_property(patches, module.Accelerator, "mixed_precision", make):
        LIVING.restore()
        patches.keep(LIVING, LIVING)


def _tables_of(*kinds: Any) -> list[dict[Any, Any]]:
    """How YAML represents classes: the tables of these kinds and of dumpers with their own.

    A dumper has one once something was added to it, as jsonargparse adds to ``SafeDumper``.
    """
    waiting, tables = [*kinds], {}
    while waiting:
        kind = waiting.pop()
        tables[id(kind.yaml_representers)] = kind.yaml_representers
        waiting += kind.__subclasses__()
    return [*tables.values()]


@_in_our_modes
def prepare(original: Any, accelerator: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
    """Convert and cast all arguments at once; Accelerate would go one by one, in their order."""
    from torch.nn import Module
    from torch.optim import Optimizer

    from accelerate_bf16 import models
    from torch_bf16 import plugin_api

    placement = kwargs.get("device_placement")
    if placement is not None and (len(placement) != len(args) or uses_deepspeed(accelerator)):
        return original(accelerator, *args, **kwargs)  # which refuses it; nothing is changed yet
    with _preparing(accelerator, mode) as preparation:
        # Including prepared ones: the Accelerator that prepared them may not have had our mode.
        passed_models = [each for each in args if isinstance(each, Module)]
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        if optimizers and not passed_models:
            arguments = getattr(accelerator, "_bf16_trainer_arguments", None)
            refusals.refuse_data_parallel(mode, arguments)
        plugin_api.refuse_replaced(optimizers, accelerator._optimizers)
        if uses_deepspeed(accelerator):
            if not optimizers:
                return original(accelerator, *args, **kwargs)
            preparation.convert_for_deepspeed(passed_models, optimizers, schedulers(args))
            result = original(accelerator, *args, **kwargs)
            preparation.add_engine(attach(accelerator))
            # Only now, because the engine casts.
            for model in passed_models:
                models.carry_autocast(model, accelerator, preparation.compute_for(model))
            return result
        if _fsdp_version(accelerator) != 2:
            preparation.run(passed_models, optimizers)
            return original(accelerator, *args, **kwargs)

        # FSDP2 does not call prepare_model. Models are sharded in fp32 and then cast, so that exact
        # masters start from fp32 shards, even if only the first rank has loaded the weights and
        # sends them to the others.
        wrapped = _wrapped_models(accelerator)
        new = [each for each in passed_models if each not in wrapped]
        preparation.take(passed_models, optimizers)
        groups = preparation.fp32_groups(new)
        preparation.convert()
        with separate_groups(groups):
            result = original(accelerator, *args, **kwargs)
        prepared = [each for each in accelerator._models if each not in wrapped]
        preparation.cast(map(models.unwrap_model, prepared))
        for model in prepared:
            models.carry_autocast(model, accelerator, preparation.compute_for(model))
            wrapped.add(model)
            _every_wrapped.add(model)
        return result


@without_deepspeed
def prepare_model(
    original: Any, accelerator: Any, mode: str, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Cast a model before it is wrapped, and sync exact masters between replicas afterwards."""
    from accelerate_bf16 import models
    from torch_bf16 import plugin_api

    with _preparing(accelerator, mode) as preparation:
        preparation.run([model], [])
        if models.is_wrapped(model):
            return original(accelerator, model, *args, **kwargs)
        models.carry_autocast(model, accelerator, preparation.compute_for(model))
        trained_by = preparation.optimizers_of(model)
        try:
            prepared = original(accelerator, model, *args, **kwargs)
        except ValueError as error:
            refusals.explain_mixed_unit(mode, error)
            raise
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        sent = getattr(plugin, "sync_module_states", False)
        plugin_api.sync_wrapped_masters(prepared, sent)
        refusals.refuse_left_behind(mode, trained_by)
        _wrapped_models(accelerator).add(prepared)
        _every_wrapped.add(prepared)
        return prepared


@without_deepspeed
def prepare_optimizer(
    original: Any, accelerator: Any, mode: str, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Convert an optimizer that is prepared without a model."""
    with _preparing(accelerator, mode) as preparation:
        preparation.run([], [optimizer])
        return original(accelerator, optimizer, *args, **kwargs)


@without_deepspeed
def autocast(original: Any, accelerator: Any, mode: str, autocast_handler: Any = None) -> Any:
    """The context of the wrapped forward, for modules that are called outside it.

    If models compute in different ways, it is that of the one whose optimizer was prepared last.
    """
    from accelerate_bf16 import models
    from accelerate_bf16.recipe_options import options_of

    # Read once: called for every batch, and parsing the environment takes half a millisecond.
    if "_bf16_compute" not in vars(accelerator):
        accelerator._bf16_compute = options_of(accelerator).recipe(mode).compute
    return models.autocast(accelerator, accelerator._bf16_compute, autocast_handler)


@_in_our_modes
def log(original: Any, accelerator: Any, mode: str, values: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the monitors' figures; the script's own values win."""
    from accelerate_bf16.monitoring import metrics_of

    values = {**metrics_of(accelerator._optimizers), **values}
    return original(accelerator, values, *args, **kwargs)


@_in_our_modes
def save_averages(original: Any, accelerator: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
    """Save the averages of schedule-free optimizers, whatever mode they are in."""
    import torch_bf16
    from accelerate_bf16.optimizers import converted_optimizers

    with torch_bf16.averaged(*converted_optimizers(accelerator._optimizers)):
        return original(accelerator, *args, **kwargs)


@_in_our_modes
def get_state_dict(original: Any, accelerator: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
    """The averages of schedule-free optimizers, in copies that outlast the switch back."""
    import torch_bf16
    from accelerate_bf16.optimizers import converted_optimizers

    with torch_bf16.averaged(*converted_optimizers(accelerator._optimizers)) as switched:
        state_dict = original(accelerator, *args, **kwargs)
        return copy.deepcopy(state_dict) if switched else state_dict


@_in_our_modes
def load_state(original: Any, accelerator: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
    """Put schedule-free optimizers, which were saved in eval mode, into their models' modes."""
    import torch_bf16
    from accelerate_bf16 import models

    result = original(accelerator, *args, **kwargs)
    for model in accelerator._models:
        torch_bf16.follow(models.unwrap_model(model))
    return result


@contextmanager
def _preparing(accelerator: Any, mode: str) -> Iterator[Preparation]:
    """A context in which Accelerate sees the mode "no", so that it leaves bf16 weights alone."""
    global _current
    if _current is not None:
        yield _current
        return
    from accelerate_bf16.models import unwrap_model
    from accelerate_bf16.monitoring import watch
    from accelerate_bf16.optimizers import converted_optimizers, unwrap_optimizer
    from accelerate_bf16.preparation import Preparation
    from accelerate_bf16.recipe_options import options_of
    from accelerate_bf16.report import Report

    _refuse(accelerator, mode)
    _current = Preparation(
        mode,
        accelerator._models,
        accelerator._optimizers,
        options_of(accelerator),
        list(_every_wrapped),
        accelerator.__dict__.setdefault("_bf16_set_up", _Objects()),
        accelerator.__dict__.setdefault("_bf16_matched", set()),
    )
    try:
        with Patches() as patches:
            patches.set(accelerator.state, "_mixed_precision", "no")
            yield _current
        # A Trainer's arguments win.
        settings = getattr(accelerator, "_bf16_trainer_arguments", accelerator)
        _current.setup_training(
            list(_wrapped_models(accelerator)),
            settings.gradient_accumulation_steps,
            sync_each=accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False),
        )
        if compute := _current.newly_trained_compute():
            accelerator._bf16_compute = compute
        lines = list(_current.report())
    finally:
        _current = None
    if accelerator.is_main_process:
        optimizers = map(unwrap_optimizer, accelerator._optimizers)
        held = [*optimizers, *converted_optimizers(accelerator._optimizers)]
        held += map(unwrap_model, accelerator._models)
        accelerator.__dict__.setdefault("_bf16_report", Report()).show(lines, held)
    if accelerator.log_with:
        watch(accelerator._optimizers)


def _refuse(accelerator: Any, mode: str) -> None:
    refusals.refuse_engine(mode, accelerator.distributed_type.value)
    if _fsdp_version(accelerator) == 1:
        refusals.refuse_flat(mode, accelerator.state.fsdp_plugin)
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.cp_enabled:
        refusals.refuse_engine(mode, "context parallelism")


def _fsdp_version(accelerator: Any) -> int | None:
    """1 or 2, or None without FSDP."""
    if accelerator.distributed_type.value != "FSDP":
        return None
    return getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1)


def _wrapped_models(accelerator: Any) -> Any:
    """The wrapped models; the accelerator's own list also has bare ones."""
    return accelerator.__dict__.setdefault("_bf16_wrapped", _Objects())


class _Objects(MutableSet):
    """A set that keeps nothing in it alive, and that can be pickled with an Accelerator.

    The one added last comes last, so that all ranks agree which wrapper of a model is the newest.
    """

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self._known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        for each in objects:
            self.add(each)

    def add(self, value: Any) -> None:
        self.discard(value)
        self._known[value] = None

    def discard(self, value: Any) -> None:
        self._known.pop(value, None)

    def __contains__(self, value: object) -> bool:
        return value in self._known

    def __iter__(self) -> Iterator[Any]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self),)


_every_wrapped = _Objects()
"""Those of all Accelerators, and those that an Accelerator has freed."""

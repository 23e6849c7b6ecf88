"""Every seam between Accelerate and us: the only file that names Accelerate's private parts.

``bf16_autoload`` calls :func:`on_import` right after two modules of Accelerate have been executed,
before anybody imports a name from them. ``accelerate`` and ``accelerate.accelerator`` are
half-executed then, so ``Accelerator`` itself is changed when the first ``AcceleratorState`` is
made, inside the first ``Accelerator()``. Only methods are replaced and enum members added, on
classes that everybody shares; no name is rebound, so nobody holds a stale alias when Accelerate was
imported first.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from ._host_sharding import (
    choosing_the_policy,
    groups_of_their_own,
    load_states_into_fresh_optimizers,
)
from ._host_training import (
    autocast,
    clip_grad_norm_,
    clip_grad_value_,
    init_trackers,
    log,
    mode_of,
)
from .enum_members import add_alias, add_member
from .modes import ALIASES, MODES, canonical, canonical_or_refuse
from .refusals import (
    CONTEXT_PARALLELISM,
    explain_mixed_unit,
    refuse_engine,
    refuse_left_behind,
)
from .registration import check_version

if TYPE_CHECKING:
    from .preparation import Preparation

__all__ = ["accept_handlers", "on_import"]

_OPTIONS = "_bf16_recipe_options"

_current: Preparation | None = None
"""The call of ``prepare`` that is running; it has methods of ``Accelerator`` inside it."""


def on_import(module: ModuleType) -> None:
    """Make the modes known to a module of Accelerate that has just been executed.

    Args:
        module: ``accelerate.utils.dataclasses`` or ``accelerate.state``; mutated, once.

    Raises:
        ImportError: this Accelerate is too old.
    """
    check_version(sys.modules["accelerate"].__version__)
    if module.__name__ == "accelerate.utils.dataclasses":
        _extend_dataclasses(module)
    else:
        _extend_state(module)
        _extend_parsers()


def _extend_dataclasses(module: Any) -> None:
    for mode in MODES:
        add_member(module.PrecisionType, _identifier(mode), mode)
    for alias, mode in ALIASES.items():
        add_alias(module.PrecisionType, _identifier(alias), alias, module.PrecisionType(mode))
    for plugin, make in (
        ("DeepSpeedPlugin", _refusing("DEEPSPEED")),
        ("MegatronLMPlugin", _refusing("MEGATRON_LM")),
        ("FullyShardedDataParallelPlugin", choosing_the_policy),
    ):
        _replace(getattr(module, plugin), "set_mixed_precision", make)


def _extend_state(module: Any) -> None:
    state = module.AcceleratorState
    _replace(state, "__init__", functools.partial(_canonical_state, state))
    if mode := canonical(state._shared_state.get("_mixed_precision")):
        # An Accelerator was made before us, with a name that came unchecked from the environment.
        state._shared_state["_mixed_precision"] = mode
    _extend_accelerator()


def _extend_parsers() -> None:
    # Standard library only, and argparse reads the choices when a parser is built: early enough for
    # the command line, also as python -m accelerate.commands.launch.
    parsers = importlib.import_module("accelerate.commands.utils")
    for name in ("CustomArgumentParser", "CustomArgumentGroup"):
        _replace(getattr(parsers, name), "add_argument", _with_our_choices)


def _extend_accelerator() -> None:
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if accelerator is not None:
        _replace(accelerator, "__init__", _with_handlers)
        for make in (
            *(_prepare, _prepare_model, _prepare_optimizer),
            *(autocast, clip_grad_norm_, clip_grad_value_, init_trackers, log),
        ):
            _replace(accelerator, make.__name__.removeprefix("_"), make)
        load_states_into_fresh_optimizers()


def accept_handlers() -> None:
    """Let ``Accelerator`` take our kwargs handlers; imports it."""
    importlib.import_module("accelerate.accelerator")
    _extend_accelerator()


def _with_handlers(original: Any) -> Any:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        handlers = list(bound.arguments.get("kwargs_handlers") or ())
        options = [each for each in handlers if type(each).__name__ == "BF16RecipeKwargs"]
        if options:
            bound.arguments["kwargs_handlers"] = [e for e in handlers if e not in options]
        original(*bound.args, **bound.kwargs)
        if len(options) > 1:
            raise ValueError("one BF16RecipeKwargs can be passed in kwargs_handlers, not several")
        if options:
            if canonical(self.state._mixed_precision) is None:
                raise ValueError(
                    f"BF16RecipeKwargs has no effect with mixed_precision="
                    f"{self.state._mixed_precision!r}; use one of {', '.join(MODES)}"
                )
            setattr(self, _OPTIONS, options[0])

    return __init__


def _replace(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, "_before_bf16"):
        replacement: Any = functools.wraps(original)(make(original))
        replacement._before_bf16 = original
        setattr(owner, name, replacement)


def _identifier(mode: str) -> str:
    return mode.upper().replace("-", "_")


def _refusing(engine: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def set_mixed_precision(self: Any, mixed_precision: Any, *args: Any, **kwargs: Any) -> Any:
            if mode := canonical(mixed_precision):
                refuse_engine(mode, engine)
            return original(self, mixed_precision, *args, **kwargs)

        return set_mixed_precision

    return make


def _canonical_state(state: Any, original: Any) -> Any:
    def __init__(self: Any, mixed_precision: Any = None, *args: Any, **kwargs: Any) -> None:
        first = not state._shared_state
        if first:
            _extend_accelerator()
            if mixed_precision is None:
                value = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
                mixed_precision = canonical_or_refuse(value)
        mode = canonical(mixed_precision)
        try:
            original(self, mode or mixed_precision, *args, **kwargs)
        except NotImplementedError:
            if first and mode:
                # Refused half-way: the next Accelerator() would take half a state for a whole one.
                state._shared_state.clear()
            raise

    return __init__


def _with_our_choices(original: Any) -> Any:
    def add_argument(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "--mixed_precision" in args and "bf16" in (kwargs.get("choices") or ()):
            ours = (name for name in (*MODES, *ALIASES) if name not in kwargs["choices"])
            kwargs["choices"] = [*kwargs["choices"], *ours]
        return original(self, *args, **kwargs)

    return add_argument


def _mode_of(accelerator: Any) -> str | None:
    if _current is not None:
        return _current.mode
    return mode_of(accelerator)


@contextmanager
def _preparing(accelerator: Any, mode: str) -> Iterator[Preparation]:
    """Inside, Accelerate takes the mode for "no", so that it leaves bf16 weights alone."""
    global _current
    if _current is not None:
        yield _current
        return
    from .monitoring import watch
    from .preparation import Preparation
    from .proof import announce

    if not _shards(accelerator):
        refuse_engine(mode, accelerator.distributed_type.value)
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.cp_enabled:
        refuse_engine(mode, CONTEXT_PARALLELISM)
    state = accelerator.state
    hidden = state._mixed_precision
    options = getattr(accelerator, _OPTIONS, None)
    _current = Preparation(mode, accelerator._models, accelerator._optimizers, options)
    state._mixed_precision = "no"
    try:
        yield _current
        _current.attach(list(_wrapped(accelerator)), accelerator.gradient_accumulation_steps)
        proofs = list(_current.proofs())
    finally:
        state._mixed_precision = hidden
        _current = None
    if accelerator.is_main_process:
        for line in proofs:
            announce(line)
    watch(accelerator)


def _shards(accelerator: Any) -> bool:
    """Whether ``prepare`` shards a model by FSDP2, between two passes over everything else."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    sharded = accelerator.distributed_type.value == "FSDP"
    return sharded and getattr(plugin, "fsdp_version", 1) == 2


def _wrapped(accelerator: Any) -> Any:
    """The models that ``prepare_model`` has returned; the accelerator's own list has bare ones."""
    return accelerator.__dict__.setdefault("_bf16_wrapped", weakref.WeakSet())


def _prepare(original: Any) -> Any:
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = _mode_of(self)
        if mode is None:
            return original(self, *args, **kwargs)
        from torch.nn import Module
        from torch.optim import Optimizer

        with _preparing(self, mode) as preparation:
            # Also those that an Accelerator has prepared: it may have been one without our mode.
            models = [each for each in args if isinstance(each, Module)]
            optimizers = [each for each in args if isinstance(each, Optimizer)]
            # All at once, because Accelerate goes by the order of the arguments.
            if _shards(self):
                return _sharded(self, preparation, models, optimizers, original, args, kwargs)
            preparation.run(models, optimizers)
            return original(self, *args, **kwargs)

    return prepare


def _sharded(
    accelerator: Any,
    preparation: Preparation,
    models: list[Any],
    optimizers: list[Any],
    original: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """``prepare`` with FSDP2, which goes past ``prepare_model``.

    Models are sharded while they are fp32 and cast then, so that exact masters start from fp32
    shards, also where only the first rank has loaded the weights and the others get theirs from it.
    """
    from .models import autocast as bf16_autocast
    from .models import bare

    new = [each for each in models if each not in _wrapped(accelerator)]
    preparation.convert(models, optimizers)
    context = bf16_autocast(accelerator.device.type, accelerator.autocast_handler)
    for model in new:
        _wrap_forward(model, context)
    with groups_of_their_own(preparation.fp32_groups(new)):
        result = original(accelerator, *args, **kwargs)
    prepared = [each for each in accelerator._models if each not in _wrapped(accelerator)]
    preparation.cast(map(bare, prepared))
    _wrapped(accelerator).update(prepared)
    return result


def _prepare_model(original: Any) -> Any:
    def prepare_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        mode = _mode_of(self)
        if mode is None:
            return original(self, model, *args, **kwargs)
        from .models import autocast as bf16_autocast
        from .models import is_wrapped, share_masters

        with _preparing(self, mode) as preparation:
            preparation.run([model], [])
            if is_wrapped(model):
                return original(self, model, *args, **kwargs)
            _wrap_forward(model, bf16_autocast(self.device.type, self.autocast_handler))
            trained_by = preparation.optimizers_of(model)
            try:
                prepared = original(self, model, *args, **kwargs)
            except ValueError as error:
                explain_mixed_unit(mode, error)
                raise
            plugin = getattr(self.state, "fsdp_plugin", None)
            share_masters(prepared, getattr(plugin, "sync_module_states", False))
            refuse_left_behind(mode, trained_by)
            _wrapped(self).add(prepared)
            return prepared

    return prepare_model


def _prepare_optimizer(original: Any) -> Any:
    def prepare_optimizer(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        mode = _mode_of(self)
        if mode is None:
            return original(self, optimizer, *args, **kwargs)
        with _preparing(self, mode) as preparation:
            preparation.run([], [optimizer])
            return original(self, optimizer, *args, **kwargs)

    return prepare_optimizer


def _wrap_forward(model: Any, context: Any) -> None:
    """Run ``forward`` under ``context`` and return fp32, as Accelerate does for its own bf16 mode.

    ``unwrap_model(keep_fp32_wrapper=False)`` knows the attributes that are set here and takes the
    wrapper off again.
    """
    from accelerate.utils import convert_outputs_to_fp32

    if "_original_forward" in model.__dict__:
        return
    function = getattr(model.forward, "__func__", None)
    if function is None:  # an instance attribute: a partial, a closure
        model._original_forward = model.forward
        model.forward = convert_outputs_to_fp32(context(model.forward))
        return
    # Accelerate keeps the bound method here, does not meet it in the chain of __wrapped__ when it
    # unwraps, and takes the user's own decorators off with ours. The function it does meet.
    model._original_forward = function
    model.forward = MethodType(convert_outputs_to_fp32(context(function)), model)

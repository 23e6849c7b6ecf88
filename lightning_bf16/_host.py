"""The only file that names private parts of Lightning.

Three changes, each of which does no harm when made again:

- the ``Literal`` of precision names grows in place, which reaches every module that imported it;
- the connectors of Trainer and Fabric make our plugin for our names;
- Fabric, which has no ``connect`` and clips past the plugin, does both in methods of its own.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch_bf16

__all__ = [
    "is_placeholder",
    "keep_averages_exact",
    "logs_this_step",
    "makes_equal",
    "on_import",
    "stage_of",
    "wrap_fabric",
]

_PLUGINS = {
    "lightning.pytorch": "lightning_bf16.pytorch",
    "lightning.fabric": "lightning_bf16.fabric",
    "pytorch_lightning": "lightning_bf16.pytorch_lightning",
    "lightning_fabric": "lightning_bf16.lightning_fabric",
}

_DEEPSPEED = (ValueError, "DeepSpeed's engine owns the optimizer and its own fp32 masters")
_XLA = (ValueError, "the fused optimizer step does not run on XLA devices")

# By name, in the namespace of the connector: what it does not know it cannot have made.
_REFUSED = {
    "DeepSpeedStrategy": _DEEPSPEED,
    "SingleDeviceXLAStrategy": _XLA,
    "XLAStrategy": _XLA,
    "XLAFSDPStrategy": _XLA,
}


def on_import(module: ModuleType) -> None:
    """Patch one of the host modules that ``bf16_autoload.TARGETS`` lists for this plugin."""
    root, _, rest = module.__name__.partition(".")
    if rest.endswith("plugins.precision.precision"):
        _add_names(module)
    elif rest.endswith("accelerator_connector"):
        family = "lightning.pytorch" if root == "lightning" else root
        attributes = ("_precision_flag", "_precision_plugin_flag")
        _wrap_connector(module._AcceleratorConnector, attributes, family, module)
    else:
        family = "lightning.fabric" if root == "lightning" else root
        attributes = ("_precision_input", "_precision_instance")
        _wrap_connector(module._Connector, attributes, family, module)


def is_placeholder(optimizer: Any) -> bool:
    """Whether this is what the Trainer puts where ``configure_optimizers`` returned None."""
    return type(optimizer).__name__ == "_MockOptimizer"


def trainer_of(module: Any) -> Any:
    """The Trainer that a module belongs to, or None."""
    return getattr(module, "_trainer", None)


def stage_of(module: Any) -> str | None:
    """``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``, None outside a Trainer."""
    trainer = getattr(module, "_trainer", None)
    function = trainer.state.fn if trainer is not None else None
    return None if function is None else str(getattr(function, "value", function))


def makes_equal(strategy: Any) -> bool:
    """Whether FSDP1 gives all ranks the weights of rank 0 as it wraps them."""
    # The Trainer's, and Fabric's.
    options = getattr(strategy, "kwargs", None) or getattr(strategy, "_fsdp_kwargs", None) or {}
    return bool(options.get("sync_module_states"))


def logs_this_step(trainer: Any) -> bool:
    """Whether what is logged during this batch reaches the loggers."""
    return trainer._logger_connector.should_update_logs


def keep_averages_exact(module: Any) -> None:
    """Keep the fp32 average of WeightAveraging callbacks out of a bf16 module's validation.

    The callback swaps average and module for the time of a validation; through bf16 parameters the
    average would come back rounded, each time.
    """
    trainer = getattr(module, "_trainer", None)
    for callback in trainer.callbacks if trainer is not None else ():
        for owner in type(callback).__mro__:
            if "_swap_models" in owner.__dict__:
                _wrap(owner, "_swap_models", _lend_average)


def _lend_average(callback: Any, original: Callable[[Any], Any], module: Any) -> None:
    from .precision import PrecisionBody

    if not isinstance(module.trainer.precision_plugin, PrecisionBody):
        original(module)
        return
    averages, own = (
        (*each.parameters(), *each.buffers()) for each in (callback._average_model.module, module)
    )
    pairs = list(zip(averages, own, strict=True))
    # Not the module's own tensors, which a version counter and exact masters hang on.
    lent = callback.__dict__.pop("_torch_bf16_lent", None)
    if lent is None:
        callback._torch_bf16_lent = [current.data.clone() for _, current in pairs]
        lent = [average.data for average, _ in pairs]
    for (_, current), values in zip(pairs, lent, strict=True):
        current.data.copy_(values)


def _add_names(module: ModuleType) -> None:
    literal = module._PRECISION_INPUT_STR
    literal.__args__ += tuple(name for name in torch_bf16.RECIPES if name not in literal.__args__)


def _wrap_connector(
    connector: type, attributes: tuple[str, str], family: str, module: ModuleType
) -> None:
    def make(self: Any, original: Callable[[], Any]) -> Any:
        # Only here, so that a program that uses another precision pays for nothing.
        from .precision import PrecisionBody

        name, given = (getattr(self, attribute) for attribute in attributes)
        if given is None and isinstance(name, str) and name in torch_bf16.RECIPES:
            given = importlib.import_module(_PLUGINS[family]).BF16Precision(name)
        elif not isinstance(given, PrecisionBody):
            return original()
        _refuse(self.strategy, given, module)
        _refuse_plugin(given, family)
        return given

    _wrap(connector, "_check_and_init_precision", make)


def _refuse_plugin(plugin: Any, family: str) -> None:
    # Fabric takes a Trainer's plugins, whose connect it never calls: optimizers would stay torch's.
    right = importlib.import_module(_PLUGINS[family]).BF16Precision
    if not isinstance(plugin, right):
        kind = type(plugin)
        raise TypeError(
            f"{kind.__module__}.{kind.__name__} cannot be used in {family}, which calls other "
            f"methods of it. Use {right.__module__}.BF16Precision with the same options"
        )


def _refuse(strategy: Any, plugin: Any, module: ModuleType) -> None:
    for name, (error, why) in _REFUSED.items():
        refused = getattr(module, name, None)
        if refused is not None and isinstance(strategy, refused):
            raise error(
                f"precision {plugin.mode!r} cannot be used with {type(strategy).__name__}: {why}. "
                "Use strategy='ddp', FSDP2 or tensor parallelism through ModelParallelStrategy, or "
                "precision='bf16-true'"
            )


def wrap_fabric(fabric: type) -> None:
    """Let Fabric's methods do for our plugins what it has no ``connect`` for; once.

    Called where the plugin's class is defined, so that spawned processes, which unpickle a Fabric
    and make none, have it too.
    """
    # Not by a hook on its module: lightning.fabric.fabric is often the one that imports torch.
    from .precision import PrecisionBody

    # Modules come before their optimizers where each is set up on its own.
    wrapped: list[weakref.ref[Any]] = []

    def setup(self: Any, original: Callable[..., Any], module: Any, *optimizers: Any, **kw: Any):
        plugin = self._precision
        if not isinstance(plugin, PrecisionBody):
            return original(module, *optimizers, **kw)
        self._validate_setup(module, optimizers)
        plugin.convert_module(getattr(module, "_orig_mod", module))
        # Before the host wraps them: its wrapper takes the class over.
        converted = plugin.convert_optimizers(optimizers)
        result = original(module, *optimizers, **kw)
        inner = (result[0] if isinstance(result, tuple) else result)._forward_module
        plugin.sync_replicas(inner, makes_equal(self._strategy))
        plugin.attach(inner, optimizers)
        plugin.announce(converted)
        return result

    def setup_module(self: Any, original: Callable[..., Any], *args: Any, **kw: Any):
        result = original(*args, **kw)
        if isinstance(self._precision, PrecisionBody):
            equal = makes_equal(self._strategy)
            self._precision.sync_replicas(result._forward_module, equal)
            wrapped.append(weakref.ref(result._forward_module))
        return result

    def setup_optimizers(self: Any, original: Callable[..., Any], *optimizers: Any, **kw: Any):
        if isinstance(self._precision, PrecisionBody):
            self._validate_setup_optimizers(optimizers)
            converted = self._precision.convert_optimizers(optimizers)
            for optimizer in optimizers:
                trained = {
                    id(p) for g in getattr(optimizer, "param_groups", ()) for p in g["params"]
                }
                for module in filter(None, (reference() for reference in wrapped)):
                    if any(id(parameter) in trained for parameter in module.parameters()):
                        self._precision.attach(module, [optimizer])
            self._precision.announce(converted)
        return original(*optimizers, **kw)

    def clip_gradients(
        self: Any,
        original: Callable[..., Any],
        module: Any,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ):
        ours = isinstance(self._precision, PrecisionBody) and float(norm_type) == 2.0
        if not ours or max_norm is None or clip_val is not None:
            return original(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)
        return self._precision.clip_in_place(
            optimizer, max_norm, error_if_nonfinite=error_if_nonfinite
        )

    for name, wrapper in (
        ("clip_gradients", clip_gradients),
        ("setup", setup),
        ("setup_module", setup_module),
        ("setup_optimizers", setup_optimizers),
    ):
        _wrap(fabric, name, wrapper)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Let ``wrapper(self, original, *args)`` stand in for a method; once."""
    original = owner.__dict__[name]
    if hasattr(original, "_torch_bf16"):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(self, functools.partial(original, self), *args, **kwargs)

    method._torch_bf16 = True  # pyright: ignore[reportAttributeAccessIssue]
    setattr(owner, name, method)

"""The ``forward`` that carries autocast along, wherever a bf16 module or a part of it is called."""

from __future__ import annotations

import copy
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.nn.utils.parametrize import ParametrizationList

from torch_bf16.errors import version_numbers
from torch_bf16.locks import fork_safe_lock
from torch_bf16.parameters import parameters_in

from .arithmetic import arithmetic, is_called_by_checkpoint, is_in_backward
from .autocast import computes_in_fp32
from .nested_tensors import map_arguments, map_tensors, widen_tensors

__all__ = [
    "CarriedForward",
    "called_through",
    "device_type",
    "has_bf16",
    "inside_step",
    "own_forward",
    "place_of_forward",
]


class _Calls(threading.local):
    depth = 0
    within = False  # another module's carried forward
    # The parts of a module without bf16 parameters, while it runs: each would look again.
    at_rest: Collection[int] = ()


class _Traced:
    """What ``_Calls`` says, for torch.compile, which guards on no attribute of a thread's own.

    Attributes:
        inside_step: whether any thread is inside a step.
    """

    def __init__(self) -> None:
        self.inside_step = False
        self._steps = 0
        self._lock = fork_safe_lock()

    def add(self, steps: int) -> None:
        """Count a step that begins (1) or ends (-1)."""
        with self._lock:
            self._steps += steps
            self.inside_step = self._steps > 0


# Older versions of torch.compile trace the function of what looks like a method, not its call.
_TRACED_AS_METHODS = version_numbers(torch.__version__) < (2, 13)

_NO_EXPORT = (
    "a model with compute='fp32' cannot be exported over its bfloat16 weights: torch.autocast, "
    "which the program would enter, takes no fp32. Export a copy in fp32, which computes the same: "
    "torch.export.export(copy.deepcopy(model).float(), ...)"
)

_NO_MODULE = (
    "this is the forward of a copy that has not been called yet, and whose class copies or pickles "
    "itself in its own way. Call the copy itself, model(x), or carry_autocast(model) first"
)

_FREED = "the module whose forward this is no longer exists: keep a reference to the module"

_calls = _Calls()
_traced = _Traced()


@contextmanager
def inside_step() -> Iterator[None]:
    """Within the context, modules that carry autocast do not enter it; in this thread only.

    What torch.compile has compiled with ``compute="bf16"`` cannot tell threads apart: it stays out
    of autocast while any thread is inside.

    For training loops that enter autocast themselves, or turn it off for a layer.

    Example:
        >>> net = torch_bf16.carry_autocast(torch_bf16.cast_model(torch.nn.Linear(4, 4)))
        >>> with inside_step(), torch.autocast("cpu", enabled=False):
        ...     net.weight.dtype, net(torch.ones(4, dtype=torch.bfloat16)).isfinite().all().item()
        (torch.bfloat16, True)
    """
    _calls.depth += 1
    _traced.add(1)
    try:
        yield
    finally:
        _calls.depth -= 1
        _traced.add(-1)


def place_of_forward(module: nn.Module) -> str:
    """The attribute in which an instance keeps a ``forward`` of its own.

    Below the hooks of Accelerate (``dispatch_model``): these call what they have found, and put it
    back when they go.
    """
    hooked = "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__
    return "_old_forward" if hooked else "forward"


def own_forward(module: nn.Module) -> Any:
    """The ``forward`` that an instance itself has; None if its class's is called."""
    own = module.__dict__.get(place_of_forward(module))
    # As hooks have found it; a CarriedForward looks like a method, too.
    if type(own) is MethodType and own == type(module).forward.__get__(module):
        return None
    return own


class CarriedForward:
    """``forward`` of one instance. To other code it looks like the method that it stands for.

    Attributes:
        own: the ``forward`` that the instance itself had; None if its class's is called.
    """

    # Whether it entered autocast itself when a checkpoint last called it.
    enters_in_checkpoints = False

    def __init__(
        self, module: nn.Module, is_outermost: bool, compute: str, autocast: dict[str, Any]
    ) -> None:
        self.compute = compute
        self.autocast = autocast
        self._is_outermost = is_outermost
        scripted = isinstance(module, torch.jit.ScriptModule)  # has no forward in its class
        # Otherwise compiled, or another library's.
        self.own = module.forward if scripted else own_forward(module)
        self._module: Callable[[], nn.Module | None] = weakref.ref(module)
        # TorchScript finds the overloads of RNNs by it.
        self.__module__ = getattr(self.__wrapped__, "__module__", __name__)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        module: Any = self._module()
        return type(module).forward.__get__(module) if self.own is None else self.own

    def __getattr__(self, name: str) -> Any:
        if name in ("own", "_module", "__wrapped__"):  # being unpickled, or the module is gone
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    @property
    def __class__(self) -> type:
        # To TorchScript and inspect, which read its source; torch.compile must not take it for what
        # it has compiled, and trace this class instead.
        if _TRACED_AS_METHODS and TracingContext.try_get() is not None:
            return CarriedForward
        compiled = hasattr(self.own, "_torchdynamo_orig_callable")
        return MethodType if self.own is None or compiled else type(self.own)

    def __reduce__(self) -> tuple[Any, ...]:
        module: Any = self._module()
        if _reduces_itself(module):
            module = None
        elif self.own is None and module is not None and not has_bf16(module):
            return getattr, (module, "forward")  # that of its class
        return _blank, (), {**self.__dict__, "_module": module}

    def __deepcopy__(self, memo: dict[int, Any]) -> CarriedForward:
        # Also of an fp32 model, whose copy must not have a method that is bound: others copy the
        # instance's __dict__ for weights of their own.
        module: Any = self._module()
        copied = memo.get(id(module))
        if copied is None and not _reduces_itself(module):
            copied = copy.deepcopy(module, memo)
        made = memo[id(self)] = _blank()
        rest = {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "_module"}
        made.__setstate__({**rest, "_module": copied})
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state["_module"]
        self.__dict__.update(state, _module=_unknown if module is None else weakref.ref(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if module is not None and torch.compiler.is_compiling():
            return _call_traced(self, module, args, kwargs)
        called, shared = called_through(sys._getframe(1))
        if shared is self and called is not module:
            _separate(called)
            return called.forward(*args, **kwargs)
        if module is None:
            raise RuntimeError(_NO_MODULE if self._module is _unknown else _FREED)
        if _calls.within:  # a forward calls parts of its own module
            return _call(self, module, args, kwargs)
        _calls.within = True
        try:
            return _call(self, module, args, kwargs)
        finally:
            _calls.within = False


def _call(carried: CarriedForward, module: Any, args: Any, kwargs: Any) -> Any:
    if id(module) in _calls.at_rest:
        return carried.__wrapped__(*args, **kwargs)
    forward, first, args, kwargs = _as_called(carried, module, args, kwargs)
    if _is_inside(carried, module):
        outputs = forward(*first, *args, **kwargs)
        widens = carried._is_outermost and carried.compute != "bf16"
        return widen_tensors(outputs) if widens and has_bf16(module) else outputs
    resting = _parts_at_rest(module)
    if resting is not None:
        before, _calls.at_rest = _calls.at_rest, resting
        try:
            return forward(*first, *args, **kwargs)
        finally:
            _calls.at_rest = before
    if carried.compute == "bf16":
        args, kwargs = map_tensors(_to_bf16, (args, kwargs))
    with inside_step(), arithmetic(device_type(module), carried.compute, **carried.autocast):
        outputs = forward(*first, *args, **kwargs)
    if isinstance(module, ParametrizationList) and module._parameters:
        # As stored: remove_parametrizations puts it where other weights are bf16.
        original: Any = next(iter(module._parameters.values()))
        return outputs.to(original.dtype) if outputs.is_floating_point() else outputs
    return widen_tensors(outputs)


def _call_traced(carried: CarriedForward, module: Any, args: Any, kwargs: Any) -> Any:
    """What ``_call`` does, as torch.compile can trace it: only the whole model enters autocast."""
    forward, first, args, kwargs = _as_called(carried, module, args, kwargs)
    device = device_type(module)
    enters = carried._is_outermost and has_bf16(module)
    if carried.compute == "bf16":
        enters = enters and not (_traced.inside_step or torch.is_autocast_enabled(device))
    if not enters:
        return forward(*first, *args, **kwargs)
    if carried.compute == "fp32":
        if torch.compiler.is_exporting():
            raise RuntimeError(_NO_EXPORT)
        return _compiled_inside(carried, args, kwargs)
    if carried.compute == "bf16":
        args, kwargs = map_tensors(_to_bf16, (args, kwargs))
    with arithmetic(device, carried.compute, **carried.autocast):
        return widen_tensors(forward(*first, *args, **kwargs))


def _as_called(carried: CarriedForward, module: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The forward that is carried, what it takes first, and arguments for weights of its own."""
    if carried.compute == "bf16" and _computes_in_bf16(module):
        args, kwargs = map_arguments(_to_bf16, args, kwargs)
    if carried.own is not None:
        return carried.own, (), args, kwargs
    # Unbound: where torch.compile breaks the graph, it takes a bound one for this instance.
    return type(module).forward, (module,), args, kwargs


_disable: Any = torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]


@functools.partial(_disable, recursive=False)
def _compiled_inside(carried: CarriedForward, args: Any, kwargs: Any) -> Any:
    with arithmetic(device_type(carried._module()), carried.compute, **carried.autocast):
        outputs = carried.__wrapped__(*args, **kwargs)
    return _disable(widen_tensors)(outputs)


def called_through(caller: FrameType) -> tuple[Any, Any]:
    """The module that calls its ``forward``, if one does, and what its instance has there.

    Libraries of meta-learning clone a module by copying its ``__dict__``: the clone has weights of
    its own, and the ``forward`` of the module that it was made from.
    """
    called = caller.f_locals.get("self")
    return called, called.__dict__.get("forward") if isinstance(called, nn.Module) else None


def _separate(clone: nn.Module) -> None:
    for each in clone.modules():
        shared = each.__dict__.get("forward")
        if isinstance(shared, CarriedForward) and shared._module() is not each:
            carried = each.__dict__["forward"] = _blank()
            carried.__dict__.update(shared.__dict__, _module=weakref.ref(each))


# Not methods: torch.compile would guard on the identity of bound ones, which are new each time.
def device_type(module: Any) -> str:
    """The type of device that a module's first tensor is on."""
    # Not next(), which torch.compile cannot trace before torch 2.8. A quantised network has buffers
    # alone.
    for tensors in (parameters_in(module), module.buffers()):
        for each in tensors:
            return each.device.type
    return "cpu"


def _computes_in_bf16(module: Any) -> bool:
    """Whether a module has bf16 weights of its own, and no autocast is on to cast its inputs."""
    if isinstance(module, nn.TransformerEncoderLayer) or "parametrizations" in module._modules:
        weights = parameters_in(module)  # it computes with weights of its parts itself
    else:
        weights = module._parameters.values()
    for p in weights:
        if p is not None and p.dtype == torch.bfloat16:
            device = p.device.type
            return device != "meta" and not torch.is_autocast_enabled(device)
    return False


def _is_inside(carried: CarriedForward, module: Any) -> bool:
    """Whether a caller has entered autocast or is inside a step, now or in the forward pass."""
    # Most calls are, and to find the device takes longer than all the rest.
    if _calls.depth > 0 and not carried.enters_in_checkpoints:
        return True
    device, fp32 = device_type(module), carried.compute == "fp32"
    if device == "meta":
        return True  # there is no autocast, and shapes do not depend on it
    on = computes_in_fp32(device) if fp32 else _is_on(device, carried.compute)
    inside = on or _calls.depth > 0
    if (inside and not carried.enters_in_checkpoints) or not is_called_by_checkpoint():
        return inside
    # A checkpoint that recomputes restores autocast as it found it, but knows nothing of steps.
    # Adjoint solvers of differential equations call modules in a backward pass and restore nothing.
    if is_in_backward():
        return on or not carried.enters_in_checkpoints
    carried.enters_in_checkpoints = not inside
    return inside


def _is_on(device: str, compute: str) -> bool:
    # Without a dtype, torch.autocast("cuda") means fp16, where gradients underflow unscaled.
    enabled = torch.is_autocast_enabled(device)
    other = compute == "autocast" and torch.get_autocast_dtype(device) == torch.float16
    return enabled and not other


def _blank() -> CarriedForward:
    return CarriedForward.__new__(CarriedForward)


def _unknown() -> None:
    """Stands for the module of a copy until that is called, which tells."""


def _reduces_itself(module: nn.Module | None) -> bool:
    """Whether copies are made of the state: what is in it comes before the module that it names.

    StyleGAN's persistence makes such a class of each.
    """
    cls = type(module)
    if cls.__reduce__ is object.__reduce__ and cls.__reduce_ex__ is object.__reduce_ex__:
        return False
    reduced = module.__reduce_ex__(2)
    return len(reduced) < 3 or reduced[2] is None


def has_bf16(module: nn.Module) -> bool:
    """Whether a module has a parameter in bf16."""
    return any(p.dtype == torch.bfloat16 for p in parameters_in(module))


def _parts_at_rest(module: nn.Module) -> set[int] | None:
    """The ids of a module and its parts; None if a parameter is in bf16."""
    # The generators of nn.Module take four times as long, at each call of an fp32 model.
    found: set[int] = set()
    parts: list[nn.Module | None] = [module]
    while parts:
        each = parts.pop()
        if each is None:
            continue
        for p in each._parameters.values():
            if p is not None and p.dtype == torch.bfloat16:
                return None
        found.add(id(each))
        parts += each._modules.values()
    return found


def _to_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

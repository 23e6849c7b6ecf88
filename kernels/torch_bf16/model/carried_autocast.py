"""Makes a bf16 module work wherever it is called, not only under its training loop's autocast.

Callbacks, loaders, loggers and users of a trained module call it or a part of it, often with fp32
inputs and outside autocast. So a module and each of its parts get a ``forward`` that carries
autocast along, as an attribute of the instance.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from torch_bf16.argument_checks import check_compute, check_module
from torch_bf16.parameters import parameters_in

from .carried_forward import CarriedForward, has_bf16, own_forward, place_of_forward

__all__ = ["carry_autocast", "check_scripted"]

_M = TypeVar("_M", bound=nn.Module)


def carry_autocast(model: _M, *, compute: str | None = None, **autocast: Any) -> _M:
    """Let a bf16 model and its parts work wherever they are called, with fp32 inputs too.

    Called where autocast is off, or is to fp16, as ``torch.autocast("cuda")`` is, ``forward``
    enters its own and returns fp32; within another forward, or under autocast to bf16, only what
    the whole model returns becomes fp32. With ``compute="fp32"`` it also enters its own autocast
    inside an autocast to bf16. A parametrized weight is computed likewise, and returned in the
    dtype in which it is stored. While no parameter is bf16, after ``model.float()`` or inside a
    ``torch.func.functional_call`` with fp32 weights, the module's own ``forward`` runs as it is.

    Hooks of Accelerate (``dispatch_model``) may come and go, before the call or after it. State
    dicts do not contain it; copies and pickles keep it, and need this package where they are
    loaded. The pickle of a model without bf16 parameters does not, but each ``forward`` in it is
    bound to its module: do not clone the loaded one by its ``__dict__``, as meta-learning does.

    Tensors in arguments and results are found in the containers that ``torch.utils._pytree`` knows:
    tuples, lists, dicts, tensordicts and outputs of transformers and diffusers; and in dataclasses,
    mappings and distributions of ``torch.distributions``, unless they forbid copies or writes.
    Tensors in other objects stay bf16.

    Args:
        model: a cast model; sets ``forward`` on it and its parts. Another call changes the
            settings.
        compute: ``"autocast"``, ``"fp32"``, or ``"bf16"``, which casts floating-point inputs
            instead, also those of each part that has bf16 weights of its own (there not in
            dataclasses, mappings or distributions); see :func:`torch_bf16.arithmetic`. None
            keeps what the model carries, such as the ``"fp32"`` of a recipe that it was cast by;
            without that, ``"autocast"``.
        **autocast: settings of ``torch.autocast`` other than device and dtype.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: ``compute`` is unknown.
        NotImplementedError: ``compute`` is ``"fp32"`` and a part is a ``ScriptModule``.

    Example:
        >>> net = torch_bf16.cast_model(torch.nn.Linear(4, 4))
        >>> carry_autocast(net)(torch.ones(2, 4)).dtype
        torch.float32
    """
    check_module("carry_autocast", model)
    if compute is None:
        compute = next((each.compute for _, each in _carried_in(model)), "autocast")
    check_compute(compute)
    check_scripted(model, compute)
    whole = dict(model.named_children()).get("_orig_mod", model)  # what torch.compile traces
    for each in model.modules():
        carried = own_forward(each)
        if isinstance(carried, CarriedForward):
            carried.compute, carried.autocast = compute, autocast
            carried._module = weakref.ref(each)  # a copy may not know it yet
        elif _is_called(each) and has_bf16(each):
            carried = CarriedForward(each, each is whole, compute, autocast)
            each.__dict__[place_of_forward(each)] = carried
    return model


def check_scripted(model: nn.Module, compute: str) -> None:
    """Refuse scripted parts in a model that is to compute in fp32.

    Raises:
        NotImplementedError: there is a part that has parameters and is a ``ScriptModule``.
    """
    for name, each in model.named_modules() if compute == "fp32" else ():
        if isinstance(each, torch.jit.ScriptModule) and any(True for _ in parameters_in(each)):
            raise NotImplementedError(
                f"compute='fp32' does not reach into {name or 'the model'!r}, a ScriptModule: what "
                "torch.jit.script compiles rounds to bf16 within, and its backward pass would mix "
                "two dtypes. Leave the module as it is and script copy.deepcopy(model).float() "
                "once it is trained, or leave compute at 'autocast'"
            )


def _is_called(module: nn.Module) -> bool:
    # A compiled module calls the module inside it, which is one of the parts, too.
    if "_orig_mod" in module._modules:
        return False
    if isinstance(module, torch.jit.ScriptModule):
        return True
    # Where a class says forward = NotImplemented, as geoopt's manifolds do, nothing is called.
    forward = type(module).forward
    return callable(forward) and forward is not nn.Module.forward


def _carried_in(model: nn.Module) -> Iterator[tuple[nn.Module, CarriedForward]]:
    for each in model.modules():
        carried = own_forward(each)
        if isinstance(carried, CarriedForward):
            yield each, carried

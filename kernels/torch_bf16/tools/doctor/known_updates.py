"""The updates that an optimizer's state determines, of ours and of other libraries.

A checkpoint does not name its optimizer's class, so an update is recognized by the names of what
is saved. Whatever else is saved beside a weight may be a part of its update, which is then unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from torch_bf16.rules.weight_decay import decay_per_lr
from torch_bf16.states.views import COUNTER, MASTERS
from torch_bf16.tools.foreign_states import extra_bits

from .exact import CHUNK, Read, moment

__all__ = ["Update", "finite", "known_update", "steps_taken"]

Update = Callable[[Tensor, int, int], Tensor]
"""``update(w, start, stop)``: the update of those elements of a flattened weight, which are ``w``
now, in fp32; NaN where a state is not finite."""

# Options of SGD and of RMSprop, whose buffer is the update. Muon and others make theirs from it.
_UPDATE_IS_BUFFER = ("dampening", "centered")
_BUFFER_HAS_LR = "lr_in_momentum"  # an option of timm's RMSpropTF
# Of ADOPT, ours and timm's, whose first moment is the update; of Prodigy, which scales lr by d.
_UPDATE_IS_FIRST_MOMENT = ("clip", "clip_exp")
_PRODIGY = "d_coef"
# Of LAMB, AdamP, D-Adaptation, AvaGrad, DualAdam and Conda, in this order.
_UNKNOWN = {
    *("grad_averaging", "trust_clip", "wd_ratio", "d", "gamma", "switch_rate", "update_proj_gap")
}

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_COUNTS = ("step", "mu_product", COUNTER)
_OF_PRODIGY = ("s", "p0")


def known_update(
    state: Mapping[str, Any], group: Mapping[str, Any], shape: Sequence[int], lr: float
) -> Update | None:
    """The next update of a weight, as if its gradient were the mean that is saved.

    Known are those of Adam, AdamW, NAdam, ADOPT, Prodigy and Lion, of SGD and RMSprop with
    momentum, and of RAdam of torch and ours. A class whose states and options are all Adam's, as
    another library's RAdam's, is taken for Adam.

    Args:
        state: what the optimizer keeps for the weight.
        group: its hyperparameters.
        shape: the weight's shape; moments of another one, as of a projection, say nothing here.
        lr: the learning rate.
    """
    buffer = _moment(state, "momentum_buffer", shape)
    if buffer is not None and any(key in group for key in _UPDATE_IS_BUFFER):
        if group.get(_BUFFER_HAS_LR):
            return None
        return lambda w, start, stop: buffer(start, stop) * -lr
    known = (*_MOMENTS, *_OF_PRODIGY) if _PRODIGY in group else _MOMENTS
    betas = group.get("betas")
    first = _moment(state, "exp_avg", shape)
    if first is None or not isinstance(betas, (tuple, list)) or len(betas) != 2:
        return None
    if not _keeps_only(known, state) or (_PRODIGY not in group and group.keys() & _UNKNOWN):
        return None
    decay = _decay(group)
    if any(key in group for key in _UPDATE_IS_FIRST_MOMENT):
        return lambda w, start, stop: first(start, stop).add_(w, alpha=decay).mul_(-lr)
    second = _moment(state, "max_exp_avg_sq", shape) or _moment(state, "exp_avg_sq", shape)
    if second is not None:
        rates = [min(max(finite(beta, 0.0), 0.0), 1 - 1e-12) for beta in betas]
        if not _are_of_one_gradient(first, second, rates, prod(shape)):
            return None
        return _adam(first, second, rates, group, steps_taken(state, group), lr)
    if "eps" in group:
        return None

    def of_sign(w: Tensor, start: int, stop: int) -> Tensor:
        mean = first(start, stop)
        # The sign of NaN is 0.
        return (mean - mean).add_(mean.sign_()).add_(w, alpha=decay).mul_(-lr)

    return of_sign


def steps_taken(state: Mapping[str, Any], group: Mapping[str, Any]) -> int:
    """How many steps a weight's optimizer has taken, which some count per group; 0 if unknown."""
    steps = finite(state.get("step"), 0.0) or finite(group.get("step"), 0.0)
    return max(0, int(steps))


def finite(value: Any, default: float) -> float:
    """A number of a checkpoint; ``default`` if it is anything else, NaN or infinite."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        found = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return default
    return found if math.isfinite(found) else default


def _moment(state: Mapping[str, Any], name: str, shape: Sequence[int]) -> Read | None:
    """A reader of a moment as :func:`.moment`'s, but with NaN in place of infinities.

    Divided by an infinity, an update would be 0 in every step to come, and look like a small one.
    """
    read = moment(state, name, shape)
    if read is None:
        return None

    def checked(start: int, stop: int) -> Tensor:
        numbers = read(start, stop)
        return numbers.masked_fill_(numbers.isinf(), math.nan)

    return checked


def _keeps_only(known: Sequence[str], state: Mapping[str, Any]) -> bool:
    """Whether a state has nothing but these moments, counts and what belongs to the weight."""
    expected = {*known, *(f"{name}_scale" for name in known), *_COUNTS, *MASTERS}
    return all(
        key in expected or extra_bits(key) or each is None or isinstance(each, (bool, str))
        for key, each in state.items()
    )


def _decay(group: Mapping[str, Any]) -> float:
    options = ("weight_decay", "fully_decoupled_weight_decay")
    decay = decay_per_lr({key: finite(group.get(key), 0.0) for key in options})
    # A decay that is not decoupled is in the moments.
    return decay if group.get("decoupled_weight_decay", True) else 0.0


def _are_of_one_gradient(first: Read, second: Read, rates: list[float], numel: int) -> bool:
    """Whether the first moment can be a mean of what the second is the mean square of.

    In pytorch_optimizer's ADOPT, whose options say nothing, it is a mean of gradients already
    divided, which is larger unless they are large. By Cauchy and Schwarz
    ``m**2 <= v * (1 - beta1)**2 / ((1 - beta2) * (1 - beta1**2 / beta2))``.
    """
    beta1, beta2 = rates
    if beta1 * beta1 >= beta2:
        return True
    most = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2))
    stop = min(numel, CHUNK)
    beyond = first(0, stop).abs() > 1.1 * most * second(0, stop).sqrt()
    return int(beyond.count_nonzero()) <= stop / 2


def _adam(
    first: Read, second: Read, rates: list[float], group: Mapping[str, Any], step: int, lr: float
) -> Update:
    eps, decay = finite(group.get("eps"), 1e-8), _decay(group)
    # Moments that are not corrected for their start, or of an unknown age, are as old as can be.
    by_default = group.get("bias_correction", _PRODIGY not in group)
    corrected = step and group.get("use_bias_correction", by_default)
    bias1, bias2 = (1 - beta**step if corrected else 1.0 for beta in rates)
    if _PRODIGY in group:
        d = finite(group.get("d"), 0.0)
        lr, eps = lr * d, eps * d
    # torch's RAdam alone has this option but not amsgrad or NAdam's.
    rectified = "decoupled_weight_decay" in group and not group.keys() & {
        "amsgrad",
        "momentum_decay",
    }
    scale = _rectification(rates[1], step) if rectified else 1.0

    def update(w: Tensor, start: int, stop: int) -> Tensor:
        mean = first(start, stop).div_(bias1)
        if scale is not None:
            root = second(start, stop).div_(bias2).sqrt_().add_(eps)
            mean.div_(root).mul_(scale)
        return mean.add_(w, alpha=decay).mul_(-lr)

    return update


def _rectification(beta2: float, step: int) -> float | None:
    """RAdam's factor (Liu et al., 2020, algorithm 2); None as long as it follows the mean alone."""
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / (1 - beta2**step) if step else longest
    if length <= 5:
        return None
    of_length, of_longest = ((each - 4) * (each - 2) / each for each in (length, longest))
    return math.sqrt(of_length / of_longest)

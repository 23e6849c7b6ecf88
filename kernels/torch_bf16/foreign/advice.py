"""Advice on what to use in place of an optimizer that cannot be converted, by its class."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_bf16.engine.wrappers import optimizers_in
from torch_bf16.errors import full_name

__all__ = ["SCHEDULE_FREE", "advice", "refusal", "refusal_of_holder"]

SCHEDULE_FREE = {
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": "AdamWScheduleFree",
    "schedulefree.sgd_schedulefree.SGDScheduleFree": "SGDScheduleFree",
}
"""Schedule-free classes, and our class with the same arithmetic."""

_INT8 = (
    "exp_avg='int8', exp_avg_sq='int8' (of Recipe, get_recipe, BF16Precision and "
    "BF16RecipeKwargs; BF16_EXP_AVG=int8 BF16_EXP_AVG_SQ=int8 for a launcher)"
)

_RELEASED = "BF16_RELEASE_GRADIENTS=1 and max_grad_norm=0, which steps inside backward(), too"
_WITHOUT_HOOK = (
    "Make model and optimizer again, while the weights are float32, over which this class puts no "
    "hook; the mode casts them afterwards"
)
_ADVICE = {
    "bitsandbytes.": "Its 32-bit and paged 32-bit classes are taken as they are; or use torch_bf16."
    f"AdamW with {_INT8}",
    "galore_torch.adamw8bit.": "GaLoreAdamW of the same package is taken as it is; or use "
    f"torch_bf16.AdamW with {_INT8}",
    "apollo_torch.q_apollo.": "APOLLOAdamW of the same package is taken as it is",
    "dion.dion.": "Dion2, NorDion2, NorMuon and Muon of the same package are taken as they are",
    "geoopt.optim.": "Let it train what lies on manifolds alone, kept in float32 by keep_fp32, "
    "which takes names of parameters and the class geoopt.Manifold, and let another train the rest",
    "heavyball.": "torch_bf16 has AdamW, NAdam, RMSprop, ADOPT, SGD, Muon and AdamWScheduleFree, "
    "and SOAP, Kron (PSGD), LaProp and AdEMAMix of pytorch_optimizer are taken as they are",
    "lomo_optim.lomo.": "It updates each weight inside backward(), which release_gradients(model, "
    "optimizer) does with torch_bf16.SGD, 2 bytes per parameter with bf16-stochastic (the option "
    "release_gradients=True of both plugins)",
    "lomo_optim.adalomo.": "It updates each weight inside backward(), which release_gradients("
    "model, optimizer) does with torch_bf16.AdamW and int8 moments, 4.2 bytes per parameter with "
    "bf16-stochastic (the option release_gradients=True of both plugins)",
    "schedulefree.adamw_schedulefree_closure.": "AdamWScheduleFree of the same package is taken",
    "schedulefree.sgd_schedulefree_closure.": "SGDScheduleFree of the same package is taken",
    "schedulefree.radam_schedulefree_closure.": "RAdamScheduleFree of the same package is taken",
    "schedulefree.wrap_schedulefree": "It averages in the weights' own memory, where bf16 loses "
    "most of an average: use torch_bf16.AdamWScheduleFree or SGDScheduleFree",
    "simpletuner.helpers.training.optimizers.adamw_bfloat16.": "--optimizer torch-adamw is "
    "taken, and becomes torch_bf16.AdamW",
    "toolkit.optimizers.adafactor.": _WITHOUT_HOOK,
    "toolkit.optimizers.adam8bit.": _WITHOUT_HOOK,
    "toolkit.optimizers.automagic.": _WITHOUT_HOOK,
    "toolkit.optimizers.prodigy_8bit.": _WITHOUT_HOOK,
    "torch.optim.sparse_adam.": "Make the embedding with sparse=False and give it to Adam or AdamW",
    "torch.optim.lbfgs.": "Train with LBFGS in float32, or in these modes with AdamW or SGD",
    "torchao.optim.": f"Its _AdamW is taken as it is; or use torch_bf16.AdamW with {_INT8}",
    "transformers.trainer_pt_utils.LayerWiseDummyOptimizer": "Use optim='galore_adamw' without "
    f"'_layerwise', or optim='adamw_torch' with {_RELEASED}",
    "llamafactory.train.trainer_utils.DummyOptimizer": "Leave out galore_layerwise and "
    f"apollo_layerwise, or use neither GaLore nor APOLLO with {_RELEASED}",
    "badam.block_optim.": f"In its place leave out use_badam, with {_RELEASED}; BF16_EXP_AVG=int8 "
    "BF16_EXP_AVG_SQ=int8 then train all blocks at 4.2 bytes per parameter",
}

_OTHERS = "Keep this optimizer and train in float32, or use one that torch_bf16 has"


def advice(kind: type, eight_bit: str | None = None) -> str:
    """What to use instead of a class that is refused.

    Args:
        kind: the class.
        eight_bit: the name of our class with the same arithmetic if its moments have 8 bits.
    """
    name = full_name(kind)
    if eight_bit is not None:
        return (
            f"torch_bf16.{eight_bit} keeps its moments in 8 bits, too (6.2 bytes per "
            f"parameter for AdamW, gradient included), and is what it becomes with {_INT8}"
        )
    return next((text for start, text in _ADVICE.items() if name.startswith(start)), _OTHERS)


def refusal(kind: type, why: str, eight_bit: str | None = None) -> str:
    """The message for a class that cannot be converted; arguments as of :func:`advice`."""
    return f"{full_name(kind)} cannot be converted: {why}. {advice(kind, eight_bit)}"


def refusal_of_holder(function: str, given: Any) -> str | None:
    """The message for what is not an optimizer but holds one or steps like one, else None.

    Args:
        function: name of the public function that it was passed to.
        given: the object.
    """
    held, kind = optimizers_in(given), type(given)
    if not held:
        other = isinstance(given, (type, nn.Module, torch.amp.GradScaler))
        if other or not callable(getattr(given, "step", None)):
            return None
        return (
            f"{function} takes an instance of torch.optim.Optimizer, and {full_name(kind)} "
            "is none, so that its parameters and states are not known. Train in float32, or use "
            "an optimizer of torch.optim. Nothing was changed"
        )
    what = advice(kind)
    if what == _OTHERS:
        attribute, optimizer = next(iter(held.items()))
        what = f"Pass the {type(optimizer).__name__} in its attribute {attribute} instead"
    return (
        f"{function} takes an instance of torch.optim.Optimizer, and {full_name(kind)} is "
        f"none, though it holds one. {what}"
    )

"""What a model of transformers lists in ``_keep_in_fp32_modules_strict`` stays in fp32."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torch_bf16 import cast_model, plugin_api

BF16 = torch.bfloat16


class Expert(nn.Module):
    """Declares in the words of transformers what needs fp32."""

    _keep_in_fp32_modules_strict = ("layers.*.gate", "sinks")

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"gate": nn.Linear(4, 2), "up": nn.Linear(4, 2)}) for _ in range(2)
        )
        self.layers[1]["gate"] = checkpoint_wrapper(self.layers[1]["gate"])
        self.sinks = nn.Parameter(torch.zeros(3))
        self.gate = nn.Linear(2, 2)


def test_what_a_model_declares_to_need_fp32_stays_and_computes_in_fp32():
    # As the part of another model, which is what a LightningModule is.
    model = cast_model(nn.ModuleDict({"inner": Expert()}))
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    wrapped = "inner.layers.1.gate._checkpoint_wrapped_module"
    assert kept == {
        *("inner.layers.0.gate.weight", "inner.layers.0.gate.bias", "inner.sinks"),
        *(f"{wrapped}.weight", f"{wrapped}.bias"),
    }
    assert set(plugin_api.fp32_parameters(nn.ModuleDict({"inner": Expert()}))) == kept
    gate, up = model["inner"].layers[0].values()
    with torch.autocast("cpu", BF16):
        x = torch.randn(1, 4, dtype=BF16)
        assert (gate(x).dtype, up(x).dtype) == (torch.float32, BF16)


def test_a_model_that_declares_nothing_any_more_is_cast_as_a_whole():
    model = Expert()
    model._keep_in_fp32_modules_strict = []
    assert {p.dtype for p in cast_model(model).parameters()} == {BF16}

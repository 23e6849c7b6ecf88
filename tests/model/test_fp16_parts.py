"""What is frozen in fp16 beside bf16 weights: autocast to bf16 brings some of it together."""

import pytest
import torch
from torch import nn

from torch_bf16 import cast_model, get_recipe

BF16, X = torch.bfloat16, torch.linspace(0.1, 2, 16).view(2, 8)


class Tower(nn.Module):
    """A vision tower that was loaded in fp16; on CPUs torch's norms refuse fp16, too."""

    def __init__(self, normed):
        super().__init__()
        self.body = nn.Sequential()
        self.body.token, self.body.proj = nn.Embedding(1, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8) if normed else None
        self.half().requires_grad_(False)

    def forward(self, y):
        y = self.body.proj(y)
        if self.norm is not None:
            return self.norm(y)
        return torch.cat([self.body.token(torch.tensor([0])), y])


@pytest.mark.parametrize("normed", [False, True], ids=["joined", "normed"])
def test_what_is_frozen_in_fp16_is_named_where_autocast_cannot_bring_it_together(normed):
    def model(recipe="bf16-stochastic", dtype=torch.float16):
        made = nn.Sequential()
        made.tower, made.head = Tower(normed).to(dtype), nn.Linear(8, 8)
        return cast_model(made, recipe)

    stopped = model()
    match = r"'tower' \(Tower\) has float16 weights, which .*keep_fp32=\['tower'\] \(BF16_KEEP"
    with pytest.raises(RuntimeError, match=match) as caught, torch.autocast("cpu", BF16):
        stopped(X)
    assert str(caught.value).count("keep_fp32") == 1
    for mended in (model(dtype=BF16), model(get_recipe("bf16-stochastic", keep_fp32=["tower"]))):
        with torch.autocast("cpu", BF16):
            mended(X)


def test_where_no_autocast_is_on_it_is_not_blamed_for_fp16_weights():
    model = cast_model(nn.Sequential(nn.Linear(8, 8).half().requires_grad_(False), nn.Linear(8, 8)))
    off = torch.autocast("cpu", enabled=False)
    with pytest.raises(RuntimeError, match=r"same dtype[^.]*$"), off:
        model(X)


def test_what_is_frozen_in_fp16_is_named_where_it_has_returned_and_where_autocast_is_off():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.proj = nn.Embedding(2, 8).half().requires_grad_(False), nn.Linear(8, 8)

        def forward(self, y):
            return torch.cat([self.token(torch.tensor([0])), self.proj(y)])

    match = r"'token' \(Embedding\) has float16 weights, which .*keep_fp32=\['token'\]"
    with pytest.raises(RuntimeError, match=match), torch.autocast("cpu", BF16):
        cast_model(Joined())(X)
    model = cast_model(nn.Sequential(nn.Linear(8, 8).half().requires_grad_(False), nn.Linear(8, 8)))
    inside = torch.autocast("cpu", enabled=False)(model.forward)
    match = r"'0' \(Linear\) has float16 weights and met .* inside autocast\(enabled=False\)\. Conv"
    with pytest.raises(RuntimeError, match=match), torch.autocast("cpu", BF16):
        inside(X)

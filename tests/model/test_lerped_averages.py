"""Averages that ``lerp_`` moves, as timm's and ema-pytorch's, follow bf16 weights or are named."""

import copy

import pytest
import torch
from averaged_network import move, network
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torch_bf16 import cast_model
from torch_bf16.model import foreign_averages

DECAY = 0.999


class Ema:
    """As timm.utils.ModelEmaV3 does it."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float = DECAY) -> None:
        pairs = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        mine, theirs = zip(*[p for p in pairs if p[0].is_floating_point()], strict=True)
        torch._foreach_lerp_(list(mine), list(theirs), weight=1.0 - decay)


class OneByOne(Ema):
    """As ema_pytorch.EMA does it."""

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float = DECAY) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 1.0 - decay)


def before(kind: type[Ema]) -> tuple[Ema, nn.Module]:
    model = network()
    return kind(model), cast_model(model)


def made_fp32(kind: type[Ema]) -> tuple[Ema, nn.Module]:
    model = cast_model(network())
    ema = kind(model)
    ema.module.float()
    return ema, model


@pytest.mark.parametrize("kind", [Ema, OneByOne])
@pytest.mark.parametrize("how", [before, made_fp32])
def test_an_fp32_average_follows_the_bf16_weights(how, kind):
    ema, model = how(kind)
    fp32 = copy.deepcopy(model).float()
    expected = kind(fp32)
    expected.module.load_state_dict(ema.module.state_dict())
    for _ in range(3):
        move(model)
        fp32.load_state_dict(model.state_dict())
        ema.update(model)
        expected.update(fp32)
    for name, each in expected.module.state_dict().items():
        assert torch.equal(ema.module.state_dict()[name], each), name
        assert ema.module.state_dict()[name].dtype == each.dtype


@pytest.mark.parametrize("kind", [Ema, OneByOne])
def test_a_bf16_average_is_named_once_with_what_works(kind):
    model = nn.ModuleDict({"net": network()})
    cast_model(model)
    ema = kind(model["net"])
    match = r"average of 'net\.0\.weight' is bfloat16, .* works: .* make the average before"
    with pytest.warns(UserWarning, match=match) as caught:
        ema.update(model["net"])
    ema.update(model["net"])  # a second warning would be an error
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", [Ema, OneByOne])
def test_what_loses_nothing_is_not_named(kind):
    model = cast_model(network())
    ema = kind(model)
    ema.update(model, decay=0.0)  # a copy
    kind(model.requires_grad_(False)).update(model)
    other = network().bfloat16()  # not cast by us
    kind(other).update(other)
    gradients = [torch.ones_like(p) for p in model.parameters()]  # as stock optimizers
    torch._foreach_lerp_([torch.zeros_like(g) for g in gradients], gradients, 0.1)
    [torch.zeros_like(g).lerp_(g, 0.1) for g in gradients * 200]


def test_an_averaged_model_that_was_named_is_not_named_again():
    model = cast_model(network())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    with pytest.warns(UserWarning, match="is bfloat16") as caught:
        [average.update_parameters(model) for _ in range(3)]  # the first one copies
    assert len(caught) == 1


def test_one_average_is_named_after_each_cast():
    """Whatever else is averaged in bf16 is seen once that one is mended."""
    model = cast_model(network())
    many, one_by_one, of_torch = Ema(model), OneByOne(model), AveragedModel(model)
    with pytest.warns(UserWarning, match="foreach_lerp_ rounds it to nearest"):
        many.update(model)
    one_by_one.update(model)
    of_torch.update_parameters(model)
    cast_model(network())
    with pytest.warns(UserWarning, match=r"Tensor\.lerp_ rounds it to nearest"):
        one_by_one.update(model)


def test_weights_as_lists_and_the_errors_of_torch_stay():
    cast_model(nn.Linear(2, 2))
    a, b = [torch.zeros(2)], [torch.ones(2)]
    torch._foreach_lerp_(a, b, [torch.full((2,), 0.5)])
    assert a[0].tolist() == [0.5, 0.5]
    with pytest.raises(RuntimeError, match="same number of tensors"):
        torch._foreach_lerp_(a, [*b, *b], 0.5)


def test_a_compiled_lerp_computes_the_same():
    cast_model(nn.Linear(2, 2))

    @torch.compile(backend="eager", fullgraph=True)
    def lerp(mine, theirs):
        torch._foreach_lerp_([mine], [theirs], 0.5)
        mine.lerp_(theirs, 0.5)

    mine = torch.zeros(2)
    lerp(mine, torch.ones(2))
    assert mine.tolist() == [0.75, 0.75]


def test_moments_of_an_optimizer_are_looked_up_a_limited_number_of_times(monkeypatch):
    cast_model(network())
    other = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(other.parameters(), foreach=True)
    found, lookups = foreign_averages.bf16_weights, []
    monkeypatch.setattr(foreign_averages, "bf16_weights", lambda: lookups.append(0) or found())
    monkeypatch.setattr(foreign_averages, "_LOOKUPS", 3)
    foreign_averages.watch_averages()
    for _ in range(5):
        other(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert len(lookups) == 3


def test_only_fp32_averages_of_bf16_numbers_are_brought_to_one_dtype():
    cast_model(nn.Linear(2, 2))
    narrow, wide = torch.zeros(2, dtype=torch.bfloat16), torch.ones(2)
    for move_it in (
        lambda: torch._foreach_lerp_([narrow], [wide], 0.5),
        lambda: narrow.lerp_(wide, 0.5),
    ):
        with pytest.raises(RuntimeError, match="dtype"):
            move_it()

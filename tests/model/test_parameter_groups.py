"""Parameter groups by pattern: every parameter once, under its name, decayed or not."""

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16 import param_groups


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.pos = nn.Parameter(torch.ones(3, 4))


def names_by(groups, option):
    return {name: group.get(option, "unset") for group in groups for name, _ in group["params"]}


def test_vectors_and_embeddings_are_not_decayed_and_tied_ones_count_once():
    decay = names_by(param_groups(Tied(), weight_decay=0.1), "weight_decay")
    assert decay == {
        "pos": 0.1, "embed.weight": 0.0, "block.0.weight": 0.1, "block.0.bias": 0.0,
        "block.1.weight": 0.0, "block.1.bias": 0.0,
    }  # fmt: skip


def test_patterns_and_classes_choose_and_the_first_fitting_one_counts():
    options = {"*.0.weight": {"lr": 1.0, "weight_decay": 0.5}, nn.Linear: {"lr": 2.0}}
    groups = param_groups(Tied(), weight_decay=0.1, no_decay=("pos",), groups=options)
    assert names_by(groups, "weight_decay")["pos"] == 0.0
    assert names_by(groups, "weight_decay")["block.0.weight"] == 0.5
    rates = names_by(groups, "lr")
    assert rates["block.0.weight"] == 1.0
    assert rates["block.0.bias"] == rates["embed.weight"] == 2.0
    assert rates["pos"] == "unset"


def test_keys_may_come_from_an_iterator():
    groups = param_groups(Tied(), weight_decay=0.1, no_decay=iter(["pos"]))
    assert names_by(groups, "weight_decay")["pos"] == 0.0


@pytest.mark.parametrize("keyword", ["no_decay", "groups"])
def test_a_key_that_fits_nothing_is_refused_with_the_names_there_are(keyword):
    key = {"no_decay": ("nowhere.*",), "groups": {nn.Conv2d: {"lr": 1.0}}}[keyword]
    with pytest.raises(ValueError, match=r"no trainable parameter of this Tied fits; there are"):
        param_groups(Tied(), **{keyword: key})


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"no_decay": [3]}, r"no_decay=\[3\] must hold patterns of parameter names"),
        ({"no_decay": 3}, "no_decay=3 must hold patterns"),
        ({"no_decay": [int]}, "must hold patterns .* or module classes"),
        ({"groups": {3: {"lr": 1.0}}}, "groups={3: .*} must hold patterns"),
        ({"groups": {"*": None}}, r"groups\['\*'\]=None must map names of options to values"),
        ({"groups": {"*": {"params": []}}}, "the parameters are those that the key fits"),
    ],
)
def test_keys_and_options_of_another_kind_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        param_groups(nn.Linear(2, 2), **arguments)


def test_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="has no parameter that requires a gradient"):
        param_groups(nn.ReLU())


def test_rates_in_tensors_are_told_apart_by_more_than_the_digits_that_torch_prints():
    rates = torch.tensor(1e-3), torch.tensor(1.04e-3), torch.tensor(1.04e-3)
    options = {f"block.{n}.*": {"lr": each} for n, each in enumerate(rates[:2])}
    groups = param_groups(Tied(), groups={**options, "pos": {"lr": rates[2], "betas": [0.9, 0.95]}})
    found = [each["lr"] for each in groups if "lr" in each]
    assert [id(each) for each in found] == [id(rates[2]), id(rates[0]), id(rates[0]), id(rates[1])]


def test_grouping_changes_no_bit_of_the_noise():
    def run(make):
        torch.manual_seed(0)
        module = torch_bf16.cast_model(nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)))
        optimizer = torch_bf16.AdamW(make(module), lr=1e-3, weight_decay=0.0, backend="eager")
        for p in module.parameters():
            p.grad = torch.full_like(p, 0.1)
        for _ in range(3):
            optimizer.step()
        return [p.detach() for p in module.parameters()]

    grouped = run(lambda m: param_groups(m, groups={"1.*": {"eps": 1e-8}})[::-1])
    assert all(map(torch.equal, grouped, run(lambda m: m.named_parameters())))


def test_muon_is_for_matrices_outside_of_embeddings():
    muon = names_by(param_groups(Tied(), muon=True), "use_muon")
    assert {name for name, used in muon.items() if used} == {"pos", "block.0.weight"}

"""Arguments of another type, such as parameters in place of their model, are refused by name."""

import pytest
import torch
from bad_input_cases import begun
from torch import nn

import torch_bf16
from torch_bf16 import Recipe, plugin_api
from torch_bf16.errors import with_article

LINEAR = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: torch_bf16.EMA("a"), "EMA was given a str and takes a torch.nn.Module"),
        (lambda: torch_bf16.EMA(LINEAR, "0.9"), "decay='0.9' must be a number between 0 and 1"),
        (lambda: torch_bf16.EMA(LINEAR, seed="1"), "seed='1' must be an int"),
        (
            lambda: torch_bf16.EMA(LINEAR).update_parameters("a"),
            "update_parameters was given a str and takes",
        ),
        (lambda: torch_bf16.ema_multi_avg_fn("0.9"), "decay='0.9' must be a number"),
        (
            lambda: torch_bf16.param_groups(LINEAR.parameters()),
            "param_groups was given a generator and takes a torch.nn.Module: the model itself",
        ),
        (
            lambda: torch_bf16.param_groups(LINEAR, no_decay="bias"),
            r"no_decay='bias' must be a sequence of keys: \('bias',\)",
        ),
        (
            lambda: torch_bf16.param_groups(LINEAR, groups=["bias"]),
            "must map keys to options of a group, for example",
        ),
        (
            lambda: torch_bf16.sync_masters(LINEAR.parameters()),
            "sync_masters was given a generator and takes a torch.nn.Module",
        ),
        (
            lambda: plugin_api.fp32_parameters("a"),
            "fp32_parameters was given a str and takes a torch.nn.Module",
        ),
        (
            lambda: torch_bf16.fp32_state_dict({}),
            "fp32_state_dict was given a dict and takes a torch.nn.Module",
        ),
        (
            lambda: torch_bf16.fp32_optimizer_state_dict(torch.optim.SGD(LINEAR.parameters())),
            "fp32_optimizer_state_dict was given an SGD, which does not store its numbers",
        ),
        (lambda: Recipe(keep_fp32=3), "keep_fp32=3 must be a tuple of module name patterns"),
        (lambda: Recipe(name=3), "name=3 must be a string"),
        (
            lambda: torch_bf16.release_gradients(LINEAR, begun(), max_norm="1"),
            "max_norm='1' must be a positive number, or None to clip nothing",
        ),
        (
            lambda: torch_bf16.release_gradients(LINEAR.parameters(), begun()),
            "release_gradients was given a generator and takes a torch.nn.Module",
        ),
        (
            lambda: torch_bf16.accumulate_gradients("a", begun(), "fp32"),
            "accumulate_gradients was given a str and takes a torch.nn.Module",
        ),
        (
            lambda: torch_bf16.carry_autocast("a"),
            "carry_autocast was given a str and takes a torch.nn.Module",
        ),
        (
            lambda: torch_bf16.cast_model("a"),
            "cast_model was given a str and takes a torch.nn.Module",
        ),
        (
            lambda: torch_bf16.follow("a", begun()),
            "follow was given a str and takes a torch.nn.Module",
        ),
        (
            lambda: plugin_api.matched_patterns("a", "bf16-stochastic"),
            "matched_patterns was given a str and takes a torch.nn.Module",
        ),
        (
            lambda: torch_bf16.reduce_gradients("a", begun()),
            "reduce_gradients was given a str and takes a torch.nn.Module",
        ),
        (
            lambda: plugin_api.warn_unconverted("a", "advice"),
            "warn_unconverted was given a str and takes a torch.nn.Module",
        ),
        (
            lambda: torch_bf16.exact_weights("a", begun()).__enter__(),
            "exact_weights was given a str and takes a torch.nn.Module",
        ),
    ],
)
def test_arguments_of_another_type_are_told_from_good_ones(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("AdamW", "an AdamW"),
        ("SGD", "an SGD"),
        ("RMSprop", "an RMSprop"),
        ("SAM", "a SAM"),
        ("ADOPT", "an ADOPT"),
        ("int", "an int"),
        ("Linear", "a Linear"),
        ("GPT", "a GPT"),
        ("UNet", "a UNet"),
        ("UserModel", "a UserModel"),
        ("UninitializedParameter", "an UninitializedParameter"),
        ("OneCycleLR", "a OneCycleLR"),
    ],
)
def test_messages_put_the_article_before_a_class_that_is_spoken(name, said):
    assert with_article(type(name, (), {})()) == said
    assert with_article(None) == "None"

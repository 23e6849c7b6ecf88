"""The keys of a state dict that an optimizer's parameters have, however a model was wrapped."""

import pytest

from torch_bf16.sharding import saved_names

FOUND = {
    "the same": (["a.weight"], ["a.weight", "b.weight"], {"a.weight": "a.weight"}),
    "saved inside of DDP": (["a"], ["module.a"], {"a": "module.a"}),
    "saved without DDP": (["module.a"], ["a"], {"module.a": "a"}),
    "both forms of one bare name": (
        ["a", "module.a"],
        ["a", "module.a"],
        {"a": "a", "module.a": "module.a"},
    ),
    "one of both forms": (["a"], ["a", "module.a"], {"a": "a"}),
    "either of two keys": (["a"], ["module.a", "module.module.a"], {}),
    "either of two parameters": (["module.a", "module.module.a"], ["a"], {}),
    "an adapter": (
        ["l.lora_A.default.weight"],
        ["l.lora_A.weight"],
        {
            "l.lora_A.default.weight": "l.lora_A.weight",
        },
    ),
    "not an adapter, because the key is another's": (
        ["module.l.weight", "module.l.default.weight"],
        ["l.weight"],
        {"module.l.weight": "l.weight"},
    ),
    "a part of what was saved": (["a", "b"], ["net.a", "net.b"], {"a": "net.a", "b": "net.b"}),
    "a part of two": (["a"], ["one.a", "two.a"], {}),
    "a part of which one is missing": (["a", "b"], ["net.a"], {}),
}


@pytest.mark.parametrize("case", FOUND)
def test_a_parameter_has_the_one_key_that_can_be_its_own(case):
    names, saved, expected = FOUND[case]
    assert saved_names(names, saved) == expected

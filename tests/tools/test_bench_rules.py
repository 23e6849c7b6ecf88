"""``python -m torch_bf16 bench --rules``: every elementwise rule in every format."""

import json

import pytest
import torch
from every_rule import RULES

from torch_bf16.rules import ACCUMULATE, AVERAGE, MUON, STORE, WEIGHTS
from torch_bf16.tools import cli
from torch_bf16.tools.bench import rules
from torch_bf16.tools.recipes import BY_BYTES
from torch_bf16.tools.redirection import quiet

TINY = ["bench", "--rules", "--parameters", "20000", "--tensors", "3", "--rounds", "3"]
# Not of an elementwise optimizer.
OTHERS = {rule.name for rule in (ACCUMULATE, AVERAGE, MUON, STORE)}


def test_every_elementwise_rule_is_there():
    found = {rule.name for rule, *_ in rules.RULES.values()}
    assert found == {rule.name for rule in RULES.values() if rule.role == WEIGHTS} - OTHERS


def test_each_runs_the_rule_and_the_formats_of_its_name():
    base, *others = rules.every_rule("eager")
    assert base.name == "bf16-stochastic"
    seen = set()
    for each in others:
        name, _, size = each.name.rpartition(" ")
        optimizer = each.make([(2, 64)], torch.device("cpu"))
        with quiet():
            optimizer.step()
        (group,) = optimizer.param_groups
        (parameter,) = group["params"]
        rule = optimizer.rule_of_parameter(group, parameter)
        assert rule == rules.RULES[name][0]
        assert optimizer.recipe == BY_BYTES[size]
        stored = tuple(
            optimizer.recipe.format_of(s.role, parameter.shape, parameter.dtype).name
            for s in rule.states
        )
        key = rule.name, optimizer.recipe.weights, stored
        assert key not in seen
        seen.add(key)


def test_ratios_are_per_byte_too(monkeypatch, capsys, tmp_path):
    threads = torch.get_num_threads()
    for table, names in ((rules.RULES, ("AdamW", "SGD")), (BY_BYTES, ("14", "6.2"))):
        for name in set(table) - set(names):
            monkeypatch.delitem(table, name)
    file = tmp_path / "rules.json"
    try:
        assert cli.main([*TINY, "--backend", "eager", "--json", str(file)]) == 0
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("every elementwise rule, random: ")
    assert "AdamW 6.2, SGD 6.2: weights bf16_stochastic, moments int8 / int8" in out
    record = json.loads(file.read_text())
    names = [row["name"] for row in record["results"]]
    assert names == ["bf16-stochastic", "AdamW 14", "AdamW 6.2", "SGD 14", "SGD 6.2"]
    base = record["results"][0]
    for row in record["results"]:
        share = base["moved_bytes_per_parameter"] / row["moved_bytes_per_parameter"]
        assert row["ratio_per_byte"]["median"] == pytest.approx(row["ratio"]["median"] * share)

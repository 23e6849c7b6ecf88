"""``estimate`` of folders whose ``config.json`` builds no model: it takes the weights beside it."""

import json

import pytest
import torch
from estimated_models import estimate

CONFIGS = {
    "diffusers": ({"_class_name": "UNet2DModel"}, "diffusion_pytorch_model.safetensors"),
    "timm": ({"architecture": "resnet10t"}, "model.safetensors"),
    "code of its own": (
        {"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}},
        "pytorch_model.bin",
    ),
    "newer transformers": ({"model_type": "nonesuch"}, "model.safetensors"),
}


@pytest.mark.parametrize("given", ["config.json", "."])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_that_builds_no_model_leaves_the_weights_beside_it(kind, given, tmp_path, capsys):
    pytest.importorskip("transformers")
    content, name = CONFIGS[kind]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    weights = {"b.weight": torch.zeros(6, 4), "a.bias": torch.zeros(6)}
    if name.endswith(".bin"):
        torch.save(weights, tmp_path / name)
    else:
        pytest.importorskip("safetensors.torch").save_file(weights, tmp_path / name)
    status, found, _ = estimate(capsys, tmp_path / given)
    assert (status, found["parameters"]) == (0, 30)
    assert found["notes"][0].startswith("shapes are those of the weights beside it: ")
    assert str(path) in found["notes"][0]
    status, _, err = estimate(capsys, tmp_path / given, "--batch", "8x4")
    assert (status, "is not a model that can" in err) == (2, True)
    path.rename(tmp_path / "other.json")
    assert estimate(capsys, tmp_path / "other.json")[0] == 2


def test_quantization_that_is_not_counted_is_named(capsys, tmp_path):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    content = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, **sizes}
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    for more in ({}, quantized):
        (tmp_path / "config.json").write_text(json.dumps({**content, **more}))
        _, found, _ = estimate(capsys, tmp_path)
        said = any("quantization_config (bitsandbytes) is not" in each for each in found["notes"])
        assert said == bool(more)


def test_dtypes_of_a_checkpoint_that_no_recipe_starts_from_are_named(capsys, tmp_path):
    dtypes = (torch.float64, torch.complex128, torch.float16, torch.float8_e4m3fn)
    tensors = {f"{each}": torch.zeros(6, 4).to(each) for each in dtypes}
    torch.save(tensors, tmp_path / "run.pt")
    _, found, _ = estimate(capsys, tmp_path / "run.pt")
    assert (found["parameters"], found["rows"][0]["buffers"]) == (4 * 24, 24)
    assert found["notes"][0].startswith("weights in complex128 and float64, from which no recipe")
    assert found["notes"][1].endswith(
        "except those in float8_e4m3fn, which are counted as they were saved"
    )


def test_what_is_said_of_a_config_alone_is_why_it_builds_none(capsys, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.bin").write_text("no weights")
    status, _, err = estimate(capsys, tmp_path)
    assert (status, "it has no 'model_type'" in err) == (2, True)

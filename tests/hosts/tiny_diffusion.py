"""Diffusion models of random weights that are small enough for CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import torch

__all__ = ["save_pipeline"]


def save_pipeline(folder: Path) -> None:
    """Save a Stable Diffusion pipeline, as diffusers' scripts load it, and a UNet in ``alone``."""
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel, UNet2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    blocks = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=blocks[0],
        up_block_types=blocks[1],
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    alone = UNet2DModel(
        sample_size=32,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        norm_num_groups=8,
    )
    alone.save_config(folder / "alone")
    vae = AutoencoderKL(
        block_out_channels=(16,) * 4,  # as often halved as controlnet takes for granted
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=8,
        latent_channels=4,
    )
    config = CLIPTextConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
    )
    for name, part in {"unet": unet, "vae": vae, "text_encoder": CLIPTextModel(config)}.items():
        part.save_pretrained(folder / name)
    DDPMScheduler(num_train_timesteps=100).save_pretrained(folder / "scheduler")
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    letters = [chr(33 + n) for n in range(94)]
    words = [*letters, *(f"{each}</w>" for each in letters)]
    words += [f"unused{n}" for n in range(256 - len(words))]
    vocabulary = {each: n for n, each in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    (tokenizer / "vocab.json").write_text(json.dumps(vocabulary))
    (tokenizer / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer.from_pretrained(tokenizer, model_max_length=77).save_pretrained(tokenizer)
    index = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": "0.30.0",
        "feature_extractor": [None, None],
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "DDPMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))

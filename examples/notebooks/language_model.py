# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tuning a language model with the Hugging Face Trainer
#
# A small Llama is trained and then fine-tuned from within this notebook, with `notebook_launcher`,
# in both modes. Model, tokenizer and text are local: a byte is a token, and the text is the source
# code of Python's standard library.
#
# **On a GPU** leave `use_cpu` out, and name the number of processes: `notebook_launcher(...,
# num_processes=8, mixed_precision=...)`. For a model of the hub, put
# `AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)` in place of `make_llama`.

# %%
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from accelerate import notebook_launcher
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

sys.path.append(os.environ.get("EXAMPLES", ".."))  # byte_llama.py
from byte_llama import byte_tokenizer, make_llama

from torch_bf16.tools.compare.corpus import batches, load_corpus

logging.set_verbosity_error()
logging.disable_progress_bar()
warnings.filterwarnings("ignore", category=FutureWarning)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Text and model

# %%
CONTEXT = 64
corpus = load_corpus(2_000_000)


def rows(text, n, seed):
    windows = batches(text, n=n, batch_size=1, context=CONTEXT, seed=seed)[:, 0]
    return [{"input_ids": row, "labels": row} for row in windows]


first_half, second_half = corpus.train.chunk(2)
held_out = rows(corpus.validation, 64, seed=3)
print(byte_tokenizer().decode(held_out[0]["input_ids"]))

# %% [markdown]
# ## A base, in fp32
#
# What the hub would give you.


# %%
def train(start, text, name, lr, steps, seed=0):
    """One run of the Trainer; nothing in it names a precision."""
    set_seed(seed)
    model = start or make_llama(width=64, layers=2, context=CONTEXT + 1)
    if isinstance(start, str):
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / name), max_steps=steps, per_device_train_batch_size=8,
            learning_rate=lr, weight_decay=0.1, logging_steps=20, save_strategy="no",
            report_to="none", use_cpu=True, disable_tqdm=True, seed=seed,
        ),
        train_dataset=rows(text, 8 * steps, seed=seed),
        eval_dataset=held_out,
        processing_class=byte_tokenizer(),
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    trainer.save_state()  # its log goes to trainer_state.json


train(None, first_half, "base", lr=2e-3, steps=150)

# %% [markdown]
# ## Fine-tuned in three precisions
#
# `notebook_launcher` takes the mode as it takes `"bf16"`. The function that it runs is the same.

# %%
PRECISIONS = ("no", "bf16-fp32-master", "bf16-stochastic")
for precision in PRECISIONS:
    notebook_launcher(
        train,
        (str(folder / "base"), second_half, precision, 3e-4, 150),
        num_processes=1,
        mixed_precision=precision,
    )

# %%
figure, axes = plt.subplots(figsize=(7, 3.5))
final = {}
for precision in PRECISIONS:
    log = json.loads((folder / precision / "trainer_state.json").read_text())["log_history"]
    points = [(entry["step"], entry["loss"]) for entry in log if "loss" in entry]
    final[precision] = next(entry["eval_loss"] for entry in log if "eval_loss" in entry)
    axes.plot(*zip(*points, strict=True), label=precision)
axes.set(xlabel="step", ylabel="training loss")
axes.legend(frameon=False)
plt.show()
for precision, loss in final.items():
    print(f"{precision:18} validation loss {loss:.4f}  {loss - final['no']:+.4f}")
assert all(abs(loss - final["no"]) < 0.01 for loss in final.values())

# %% [markdown]
# ## Saved and reloaded
#
# What the Trainer saves is bf16, half the size of fp32, and transformers loads it as such unless it
# is told otherwise.

# %%
for precision in PRECISIONS:
    size = (folder / precision / "model.safetensors").stat().st_size
    model = AutoModelForCausalLM.from_pretrained(str(folder / precision))
    print(f"{precision:18} {size / 1e6:.2f} MB, loaded as {model.dtype}")

# %% [markdown]
# Loaded in fp32, they lose nothing: bf16 numbers are fp32 numbers. The loss that the Trainer saw,
# from the file:

# %%
for precision in PRECISIONS:
    model = AutoModelForCausalLM.from_pretrained(folder / precision, dtype=torch.float32)
    tokens = torch.stack([row["input_ids"] for row in held_out])
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    print(f"{precision:18} {loss:.4f}, in training {final[precision]:.4f}")
    assert abs(loss - final[precision]) < 0.005

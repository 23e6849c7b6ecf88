# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading the monitor and the doctor
#
# Does this run learn, or does rounding eat it? Two tools answer: `UpdateMonitor` while it trains,
# and `python -m torch_bf16 doctor` from its checkpoints, whoever made them.
#
# **On a GPU** both work as they do here. The monitor looks at some elements of each layer every
# `every` steps and waits for the device only then.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torch_bf16

folder = Path(tempfile.mkdtemp())
torch.manual_seed(0)
x = torch.randn(2048, 32)
y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(),
        nn.Linear(128, 1),
    )  # fmt: skip


# %% [markdown]
# ## Two runs at a small learning rate
#
# One rounds to the nearest, which is what `model.to(torch.bfloat16)` with torch's AdamW does. The
# other is `bf16-stochastic`. The monitor writes what it saw into `history`.

# %%
NEAREST = torch_bf16.Recipe(
    "to the nearest", weights="bf16_nearest", exp_avg="bf16_nearest", exp_avg_sq="bf16_nearest"
)


def train(recipe, name, steps=300, lr=3e-5):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    torch_bf16.prepare(model, optimizer, recipe)
    monitor = torch_bf16.UpdateMonitor(optimizer, every=25)
    torch.save({"model": model.state_dict()}, folder / f"{name}-0.pt")
    history = []
    for step in range(1, steps + 1):
        chosen = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16):
            predicted = model(x[chosen])
        loss = nn.functional.mse_loss(predicted.float(), y[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            history.append((step, monitor.metrics()))
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{name}-1.pt"
    )
    return history


histories = {
    "to the nearest": train(NEAREST, "nearest"),
    "bf16-stochastic": train("bf16-stochastic", "stochastic"),
}

# %% [markdown]
# ## The monitor: which share of the updates survived
#
# 1 is nothing lost. Rounded stochastically a layer scatters around 1, as the few elements that were
# looked at jump or stay; rounded to the nearest it lies below, and stays there.

# %%
figure, plots = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for axes, (name, history) in zip(plots, histories.items(), strict=True):
    layers = sorted(key for key in history[-1][1] if key.startswith("bf16/survived/"))
    for key in layers:
        points = [(step, metrics[key]) for step, metrics in history if key in metrics]
        axes.plot(*zip(*points, strict=True), label="layer " + key.rsplit("/", 1)[1])
    axes.axhline(1, color="black", lw=0.5)
    axes.set(title=name, xlabel="step", ylim=(-0.1, 2))
plots[0].set_ylabel("share that survived")
plots[1].legend(frameon=False)
plt.show()


# %%
def survived(name):
    """Mean over the run of the worst layer."""
    history = histories[name]
    layers = [key for key in history[-1][1] if key.startswith("bf16/survived/")]
    return min(sum(metrics[key] for _, metrics in history) / len(history) for key in layers)


for name in histories:
    print(f"{name:16} the worst layer keeps {survived(name):.0%} of its updates")
assert survived("to the nearest") < 0.5 < 0.8 < survived("bf16-stochastic")

# %% [markdown]
# ## The doctor: from checkpoints alone
#
# It needs two checkpoints of a run, of any training, and nothing of ours in them. Its exit code is
# 1 where a run stalls, so that a script can ask it.


# %%
def doctor(name):
    command = [sys.executable, "-m", "torch_bf16", "doctor"]
    done = subprocess.run(
        [*command, f"{name}-0.pt", f"{name}-1.pt"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    return done.returncode


assert doctor("nearest") == 1

# %%
assert doctor("stochastic") == 0

# %% [markdown]
# ## What to do about it
#
# The verdict names it: `bf16-fp32-master`, or `bf16-stochastic` where memory decides. Which of the
# two, and from which learning rate on, is on the page
# [Choosing a mode](../../docs/choosing.md).

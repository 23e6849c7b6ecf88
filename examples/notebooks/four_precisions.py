# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your Trainer in four precisions
#
# One `LightningModule`, four values of `precision`: fp32, the two modes of this package, and, as
# the control, Lightning's own `bf16-true`. All start from the same weights and see the same
# batches.
#
# **On a GPU** nothing changes but `accelerator="gpu"`: there the forward pass is faster in bf16,
# and a step of the optimizer is one launch. Put your own module in place of the one below.

# %%
import logging
import warnings

import lightning
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_bf16

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

# %% [markdown]
# ## A module that knows nothing of precisions
#
# A regression that takes some training: a random network is the teacher, and a wider one learns it.


# %%
class Student(lightning.LightningModule):
    def __init__(self, lr: float = 1e-4):
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(
            nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(),
            nn.Linear(128, 1),
        )  # fmt: skip
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.network(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
x = torch.randn(4096, 32)
with torch.no_grad():
    data = TensorDataset(x, teacher(x) * 3)

# %% [markdown]
# ## Four runs
#
# The one word that changes is `precision`.

# %%
PRECISIONS = ("32-true", "bf16-fp32-master", "bf16-stochastic", "bf16-true")


def train(precision):
    lightning.seed_everything(1, verbose=False)
    student = Student()
    trainer = lightning.Trainer(
        precision=precision, max_epochs=8, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(student, DataLoader(data, batch_size=64, shuffle=True))
    return student, trainer


runs = {precision: train(precision) for precision in PRECISIONS}

# %%
window = 32
figure, axes = plt.subplots(figsize=(7, 3.5))
for precision, (student, _) in runs.items():
    smooth = torch.tensor(student.losses).unfold(0, window, 8).mean(-1)
    style = "--" if precision == "bf16-true" else "-"
    axes.semilogy(torch.arange(len(smooth)) * 8, smooth, style, label=precision)
axes.set(xlabel="step", ylabel=f"loss, mean of {window} steps")
axes.legend(frameon=False)
plt.show()

# %%
final = {precision: sum(student.losses[-64:]) / 64 for precision, (student, _) in runs.items()}
for precision, loss in final.items():
    print(f"{precision:18} {loss:.5f}  {loss / final['32-true'] - 1:+.2%}")
assert abs(final["bf16-fp32-master"] / final["32-true"] - 1) < 0.05
assert abs(final["bf16-stochastic"] / final["32-true"] - 1) < 0.05
assert final["bf16-true"] > 1.1 * final["32-true"]

# %% [markdown]
# ## What each of them holds
#
# `describe` counts what is in memory: weights, gradients and the optimizer's states.

# %%
for precision in ("bf16-fp32-master", "bf16-stochastic"):
    student, trainer = runs[precision]
    print(torch_bf16.describe(student, trainer.optimizers[0]))

# %% [markdown]
# In fp32 it is 16 bytes per parameter, with the gradient. `bf16-true` holds 8, too, and loses what
# the curve shows.
#
# ## Afterwards
#
# The module is bf16 and goes on giving fp32 results, as during training. `.float()` makes it an
# fp32 module again; from exact masters with all their bits.

# %%
student, trainer = runs["bf16-stochastic"]
print(student.network[0].weight.dtype, student.network(x[:2]).dtype)
print(student.float().network[0].weight.dtype)

# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Rounding by hand
#
# Why does a network stop learning when its weights are bf16, and what keeps it going? This notebook
# rounds numbers one at a time, with the functions that the kernels are tested against.
#
# Everything runs on a CPU in seconds. **On a GPU** the results are the same bits: noise is a pure
# function of seed, step, name and element, not of a device's generator.

# %%
import matplotlib.pyplot as plt
import torch

from torch_bf16 import numerics

# %% [markdown]
# ## A bf16 number is the upper half of an fp32 number
#
# The same sign, the same eight bits of exponent, seven bits of fraction. So it reaches as far as
# fp32 does and has 128 stations between two powers of two.


# %%
def bits(number: float, dtype: torch.dtype) -> str:
    size = {torch.float32: 32, torch.bfloat16: 16}[dtype]
    integer = {32: torch.int32, 16: torch.int16}[size]
    pattern = torch.tensor(number, dtype=dtype).view(integer).item() % 2**size
    text = f"{pattern:0{size}b}"
    return f"{text[0]} {text[1:9]} {text[9:]}"


for number in (1.0, 1.001, 1.0078125):
    print(f"{number:<10} fp32 {bits(number, torch.float32)}")
    print(f"{'':<10} bf16 {bits(number, torch.bfloat16)}")

# %% [markdown]
# 1.001 and 1.0 are the same bf16 number. The next one, 1.0078125, is eight such updates away.
#
# ## A thousand small updates

# %%
steps, update = 1000, 0.001
fp32 = torch.tensor(1.0)
nearest = torch.tensor(1.0, dtype=torch.bfloat16)
stochastic = torch.full((2000,), 1.0, dtype=torch.bfloat16)  # 2,000 weights, each with its noise
key = numerics.tensor_key("a weight")
history = []
for step in range(1, steps + 1):
    fp32 = fp32 + update
    nearest = nearest + update
    drawn = numerics.noise(
        seed=0, step=step, key=key, stream=numerics.WEIGHT.stream, start=0, n=len(stochastic)
    )
    noise = numerics.draw16(drawn, numerics.WEIGHT)
    stochastic = numerics.bf16_stochastic(stochastic.float() + update, noise)
    history.append((fp32.item(), nearest.item(), stochastic.float()))

figure, axes = plt.subplots(figsize=(7, 3.5))
axes.plot([one for one, _, _ in history], color="black", label="fp32")
axes.plot([one for _, one, _ in history], color="tab:red", label="bf16, to the nearest")
for weight in range(3):
    label = "bf16, stochastic: three weights" if weight == 0 else None
    axes.plot([many[weight] for *_, many in history], color="tab:blue", lw=0.8, label=label)
mean = [many.mean() for *_, many in history]
axes.plot(mean, color="tab:blue", lw=2.5, alpha=0.4, label="mean of 2,000")
axes.set(xlabel="updates of 0.001", ylabel="weight")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# To the nearest, the weight never leaves 1.0, as no single update is worth half a spacing (0.0039).
# Stochastically, it jumps a whole spacing with the probability that the update is of it: 12.8 %.
# Each weight is a staircase of its own, and their mean is the line of fp32.

# %%
print(f"fp32              {fp32.item():.4f}")
print(f"to the nearest    {nearest.item():.4f}")
print(f"stochastic        {stochastic.float().mean():.4f} +- {stochastic.float().std():.4f}")
assert nearest == 1
assert abs(stochastic.float().mean() - fp32) < 0.01

# %% [markdown]
# ## The chance is exact
#
# Sixteen random bits are added to the sixteen bits that are about to be cut off. So the chance of
# going up is the distance to the lower neighbour, in 1/65536 of a spacing: no rounding of the
# rounding. All 65,536 draws, counted:

# %%
draws = torch.arange(2**16, dtype=torch.int32)
number = torch.full((2**16,), 1.001)
up = (numerics.bf16_stochastic(number, draws) > 1).sum().item()
low_half = number[:1].view(torch.int32).item() & 0xFFFF
print(f"{up} of 65536 draws go up; the part that is cut off is {low_half}")
assert up == low_half

# %% [markdown]
# ## Or keep what is cut off
#
# The other way is to lose nothing. `split16` takes an fp32 number apart: a bf16 weight, which the
# model computes with, and the sixteen bits that are missing, which the optimizer keeps. Together
# they are the fp32 number, every bit of it, in four bytes instead of six.

# %%
torch.manual_seed(0)
master = torch.randn(5)
weight, remainder = numerics.split16(master)
print(weight)
print(remainder)
assert torch.equal(numerics.join16(weight, remainder).view(torch.int32), master.view(torch.int32))

# %% [markdown]
# ## What the noise does to a sum
#
# Each weight takes its own walk. After $n$ steps its distance from fp32 has grown with $\sqrt n$,
# what it has learned with $n$: noise fades. The ratio is what
# [`UpdateMonitor`](monitor_and_doctor.ipynb) calls drift over noise.

# %%
numbers = torch.arange(1, steps + 1)
scatter = torch.tensor([many.std().item() for *_, many in history])
learned = update * numbers
figure, axes = plt.subplots(figsize=(7, 3))
axes.loglog(numbers, learned, color="black", label="what is learned")
axes.loglog(numbers, scatter, color="tab:blue", label="standard deviation of the noise")
axes.set(xlabel="updates", ylabel="distance from 1.0")
axes.legend(frameon=False)
plt.show()
print(f"after {steps} updates: drift over noise {learned[-1] / scatter[-1]:.0f}")

# %% [markdown]
# ## A pure function
#
# The noise of step 7 is the noise of step 7: on every replica, after a resume, on another number of
# devices. Nothing has to be stored or sent to keep replicas alike.

# %%
options = {"seed": 0, "step": 7, "key": numerics.tensor_key("layer.weight")}
whole = numerics.noise(**options, stream=numerics.WEIGHT.stream, start=0, n=1000)
shard = numerics.noise(**options, stream=numerics.WEIGHT.stream, start=600, n=400)
assert torch.equal(whole[600:], shard)
print("elements 600 to 999 have the same noise in a shard as in the whole tensor")

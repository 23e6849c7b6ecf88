"""Small models, factories and runs for the tests of ``compare``."""

from pathlib import Path

import torch

from torch_bf16.tools.compare.rows import choice_of
from torch_bf16.tools.compare.subject import subject_of
from torch_bf16.tools.compare.training import OngoingRun, Plan, Run

FACTORIES = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.LayerNorm(32)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(32, 1)

    def forward(self, x, y):
        return (self.last(self.drop(self.norm(self.first(x)))) - y).float().square().mean()


def data():
    x = torch.randn(24, 8)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def make():
    return Net(), torch.utils.data.DataLoader(data(), batch_size=4, shuffle=True)


def with_optimizer():
    model, batches = make()
    return model, batches, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)


class Normed(Net):
    # Has parameters that every recipe keeps in fp32, and a count that no state dict has.
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x, y):
        self.seen += 1
        return super().forward(self.batch_norm(x), y) * (1 + 0.01 * self.seen)


def normed():
    return Normed(), make()[1]


def with_an_empty_parameter():
    model, batches = make()
    model.drop.none = nn.Parameter(torch.empty(0, 4))
    return model, batches


class Diverging(Net):
    steps = 0

    def forward(self, x, y):
        Diverging.steps += 1
        loss = super().forward(x, y)
        return loss * float("nan") if self.first.weight.dtype == torch.bfloat16 else loss


def diverging():
    return Diverging(), list(make()[1])


class OwnRate(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01)
        self.param_groups[0]["lr"] = None

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data -= 0.01 * p.grad


def own_rate():
    model, batches = make()
    return model, batches, OwnRate(model.parameters())


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, words):
        return self.table(words).square().mean()


def sparse():
    model = Words()
    return model, [torch.arange(5)], torch.optim.SparseAdam(model.parameters(), lr=0.01)


kept = Net()


def kept_model():
    return kept, make()[1]


def kept_part():
    model = Net()
    model.first = kept.first
    return model, make()[1]


def raises():
    raise RuntimeError("no data today")


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("no")


class FailingBackward(Net):
    def forward(self, x, y):
        return Refusing.apply(super().forward(x, y))


def failing_backward():
    return FailingBackward(), make()[1]


def failing_batches():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, place):
            return {}["label"]

    return Net(), torch.utils.data.DataLoader(Data(), batch_size=4)


def model_alone():
    return Net()


def three_numbers():
    return 1, 2, 3


def no_batches():
    return Net(), []


def few_batches():
    return Net(), iter(list(make()[1])[:3])


def lowered():
    return Net().bfloat16(), make()[1]


def frozen():
    return Net().requires_grad_(False), make()[1]


def wrong_batch():
    return Net(), [torch.randn(4, 8)]


class Vector(Net):
    def forward(self, x, y):
        return self.last(self.first(x))


def no_loss():
    return Vector(), make()[1]


number = 3


def slow_steps(parameters, lr):
    raise TypeError("not today")
"""


def plan_of(factory="mine_to_compare:make", steps=12, lr=1e-2, optimizer="torch.optim.AdamW"):
    """The plan of short runs of a factory of the current folder."""
    return Plan(subject_of(factory), choice_of(optimizer), lr, steps, "cosine", torch.device("cpu"))


def trained(plan, row, seed=0):
    """A run, trained to its end."""
    training = OngoingRun(plan, row, seed)
    for _ in training.steps():
        pass
    return training.finish()


def run(row, seed, losses, steps=None):
    """A run with these losses and nothing else."""
    return Run(row, seed, list(steps or range(1, len(losses) + 1)), list(losses))


def lightning_csv(folder: Path, losses, column="train_loss", every=1) -> Path:
    """What Lightning's CSVLogger writes: losses and validation on lines of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"epoch,step,{column},val_loss"]
    for n, loss in enumerate(losses):
        lines.append(f"0,{n * every},{loss},")
    lines.append(f"0,{(len(losses) - 1) * every},,1.5")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder

"""A network to average, which has weights and buffers."""

import torch
from torch import nn


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))


def move(model: nn.Module) -> None:
    """What a step and a forward pass would change, in place."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
        for b in model.buffers():
            b.add_(1)


class LitEma(nn.Module):
    """As ldm.modules.ema.LitEma of CompVis' latent-diffusion does it."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(decay))
        self.m_name2s_name = {}
        for name, p in model.named_parameters():
            self.m_name2s_name[name] = name.replace(".", "")
            self.register_buffer(self.m_name2s_name[name], p.clone().detach().data)

    def forward(self, model: nn.Module) -> None:
        averages = dict(self.named_buffers())
        with torch.no_grad():
            for name, p in model.named_parameters():
                average = averages[self.m_name2s_name[name]].type_as(p)
                average.sub_((1.0 - self.decay) * (average - p))

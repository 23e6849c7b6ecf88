"""A script that takes a step and says what prepared it."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=16)
engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (inputs,) in loader:
    accelerator.backward(engine(inputs).square().mean())
    optimizer.step()
Path(sys.argv[1]).write_text(
    json.dumps(
        {
            "mode": accelerator.mixed_precision,
            "engine": type(engine).__name__,
            "optimizer": type(optimizer.optimizer.optimizer).__module__,
            "stage": engine.zero_optimization_stage(),
        }
    )
)
accelerator.end_training()

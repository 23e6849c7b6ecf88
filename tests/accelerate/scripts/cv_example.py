"""Image classification, in the shape of Accelerate's own cv_example.py, on data made here."""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset


class PetsDataset(Dataset):
    """Noisy images of a bright quarter; the label says which one."""

    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (n,), generator=generator)
        self.images = torch.randn(n, 3, 16, 16, generator=generator)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            row, column = divmod(label, 2)
            image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return {"image": self.images[idx], "label": self.labels[idx]}


class Block(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.down = nn.Conv2d(n_in, n_out, 1, stride=2, bias=False)

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.down(x))


class ResNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 8), Block(8, 16))
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        return self.fc(self.blocks(x).mean((2, 3)))

    def get_classifier(self):
        return self.fc


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr, num_epochs = config["lr"], int(config["num_epochs"])
    batch_size = int(config["batch_size"])
    set_seed(int(config["seed"]))
    train_dataloader = DataLoader(PetsDataset(256, 0), shuffle=True, batch_size=batch_size)
    eval_dataloader = DataLoader(PetsDataset(128, 1), shuffle=False, batch_size=batch_size)
    model = ResNet(num_classes=4).to(accelerator.device)
    for param in model.parameters():
        param.requires_grad = True
    mean = torch.tensor([0.485, 0.456, 0.406])[None, :, None, None].to(accelerator.device)
    std = torch.tensor([0.229, 0.224, 0.225])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=lr / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer, max_lr=lr, epochs=num_epochs, steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    accurate = num_elems = 0
    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            inputs = (batch["image"] - mean) / std
            loss = torch.nn.functional.cross_entropy(model(inputs), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate = num_elems = 0
        for batch in eval_dataloader:
            inputs = (batch["image"] - mean) / std
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            accurate += (predictions == references).long().sum().item()
            num_elems += len(references)
        accelerator.print(f"epoch {epoch}: {100 * accurate / num_elems:.2f}")

    if accelerator.is_main_process:
        with open(args.result, "w") as file:
            bare = accelerator.unwrap_model(model)
            weights = str(bare.fc.weight.dtype)
            accuracy = accurate / num_elems
            json.dump(
                {"mode": accelerator.mixed_precision, "weights": weights, "accuracy": accuracy},
                file,
            )
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument(
        "--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16", "fp8"]
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("result")
    config = {"lr": 3e-2, "num_epochs": 4, "seed": 42, "batch_size": 32}
    training_function(config, parser.parse_args())


if __name__ == "__main__":
    main()

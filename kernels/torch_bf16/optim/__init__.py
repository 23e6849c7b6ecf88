"""Optimizers with ``torch.optim``'s signatures."""

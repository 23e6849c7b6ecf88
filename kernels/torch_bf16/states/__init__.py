"""What the state dicts of optimizers hold, and how it changes format."""

"""From tensors to kernel calls: made once per change, and run once per step."""

"""Whether the package works on this machine, and how fast: ``python -m torch_bf16 selftest``."""

"""``python -m torch_bf16 estimate``: what a run will take, before it starts."""

"""``python -m torch_bf16 compare``: one model in several precisions, side by side."""

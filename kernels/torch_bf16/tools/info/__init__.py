"""``python -m torch_bf16 info``: everything about this machine that a bug report needs."""

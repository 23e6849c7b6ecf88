"""``python -m torch_bf16 doctor``: has a run been learning?"""

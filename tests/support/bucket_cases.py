"""Buckets of random tensors with gradients, and the NumPy oracle's verdict on a backend's steps."""

from dataclasses import replace

import numpy as np
import oracle
import oracle_formats
import torch
from every_rule import RULES

from torch_bf16.backends import Bucket, KernelInputs, ScalarRows, Totals, Variant
from torch_bf16.backends.certificates.trial import GROUP
from torch_bf16.formats import FORMATS
from torch_bf16.numerics.counter_rng import stream_base, tensor_key

SIZES = (0, 1, 3, 4097)
OF_ORACLE = {
    torch.bfloat16: np.uint16,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.float32: np.float32,
}
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}
HYPER = {**GROUP, "maximize": False, "initial_accumulator_value": 0.2}

# weights, then one for each of the rule's states in its order; the last serves any beyond, too
LAYOUTS = {
    "stochastic": ("bf16_stochastic", "bf16_nearest", "bf16_stochastic"),
    "master": ("bf16+16", "fp32", "fp32"),
    "bf16+8": ("bf16+8", "bf16_nearest", "bf16_stochastic"),
    "int8": ("bf16_stochastic", "int8", "uint8"),
    "24 bits, int8": ("bf16+8", "int8", "uint8"),
    "half int8": ("bf16_stochastic", "bf16_nearest", "uint8"),
    "bf16+fp32": ("bf16+fp32", "bf16_stochastic", "fp32"),
    "nearest": ("bf16_nearest", "bf16_nearest", "bf16_nearest"),
    "fp32": ("fp32", "fp32", "fp32"),
}
CASES = [
    *(("adamw", layout, torch.bfloat16) for layout in LAYOUTS),
    ("adamw", "stochastic", torch.float32),
    ("adamw", "fp32", torch.float32),
    ("adam", "stochastic", torch.bfloat16),
    ("adam", "master", torch.float32),
    ("sgd", "stochastic", torch.bfloat16),
    ("sgd_momentum", "master", torch.bfloat16),
    ("sgd_nesterov", "stochastic", torch.bfloat16),
    ("adamw_amsgrad", "stochastic", torch.bfloat16),
    ("adam_amsgrad", "master", torch.bfloat16),
    ("nadam", "stochastic", torch.bfloat16),
    ("radam", "stochastic", torch.bfloat16),
    ("adopt", "stochastic", torch.bfloat16),
    ("lion", "stochastic", torch.bfloat16),
    ("cautious_adamw", "stochastic", torch.bfloat16),
    ("cautious_lion", "bf16+8", torch.float32),
    ("stable_adamw", "stochastic", torch.bfloat16),
    ("stable_adamw", "half int8", torch.bfloat16),
    ("stable_adamw", "master", torch.float32),
    ("adagrad", "stochastic", torch.float32),
    ("rmsprop", "bf16+fp32", torch.bfloat16),
    ("rmsprop_momentum", "stochastic", torch.bfloat16),
    ("rmsprop_centered", "master", torch.bfloat16),
    ("rmsprop_centered_momentum", "stochastic", torch.bfloat16),
    ("schedule_free_adamw", "stochastic", torch.bfloat16),
    ("schedule_free_sgd", "stochastic", torch.bfloat16),
    ("average", "stochastic", torch.bfloat16),
    # Blocks in place of the weight: running averages, and states that are only stored.
    ("average", "only_int8", torch.bfloat16),
    ("average", "only_uint8", torch.bfloat16),
    ("store", "only_int8", torch.float32),
    ("store", "only_uint8", torch.float32),
]
WHOLE_SIZES = (0, 64, 128, 4096 + 64)
LAYOUTS |= {f"only_{name}": (name,) * 3 for name in FORMATS}
BLOCKED = [name for name, formats in LAYOUTS.items() if {"int8", "uint8"} & set(formats)]
EVERY_RULE_AND_FORMAT = [
    (rule, f"only_{name}", gradient)
    for number, rule in enumerate(RULES)
    for place, name in enumerate(FORMATS)
    for gradient in (torch.bfloat16, torch.float32)
    # Formats and gradients are decoded apart from the rule: beyond the two Adams, every second
    # format and one dtype for each rule.
    if rule in ("adam", "adamw")
    or ((number + place) % 2 == 0 and gradient == (torch.bfloat16, torch.float32)[number // 2 % 2])
]


def id_of(case):
    return "-".join(str(part).removeprefix("torch.") for part in case)


def sizes_of(layout):
    return WHOLE_SIZES if layout in BLOCKED else SIZES


def make_case(
    rule_name,
    layout,
    gradient,
    offsets,
    sizes=None,
    seed=7,
    device="cpu",
    place=lambda t: t,
    runs=None,
    matrices=None,
):
    """``(bucket, gradients)``: random with special values among them, and zero states.

    ``place`` may put each tensor elsewhere in memory; ``runs`` is (width, pitch) of each,
    ``matrices`` (columns, rows) of those in transposed order.
    """
    sizes = sizes or sizes_of(layout)
    rule = RULES[rule_name]
    names = LAYOUTS[layout] + LAYOUTS[layout][-1:]
    formats = tuple(FORMATS[name] for name in names[: 1 + len(rule.states)])
    rng = np.random.default_rng(3)
    planes, gradients = [], []
    for size in sizes:
        weights = rng.standard_normal(size).astype(np.float32)
        weights[1:3] = [0.0, -0.0][: max(0, min(size, 3) - 1)]
        tensors = [[torch.zeros(size // p.block, dtype=p.dtype) for p in f.planes] for f in formats]
        r = torch.full((size,), 0x8000, dtype=torch.int32)
        formats[0].encode(torch.from_numpy(weights), r, tensors[0])
        planes.append([tuple(place(t.to(device)) for t in each) for each in tensors])
        g = torch.from_numpy(rng.standard_normal(size).astype(np.float32))
        if size > 100:
            g[:6] = torch.tensor([np.inf, -np.inf, np.nan, 3e38, 1e-40, 0.0])
        gradients.append(place(g.to(device, gradient)))
    n = len(sizes)
    indices = "strided" if runs else "transposed" if matrices else "consecutive"
    variant = Variant(rule, formats, gradient, gradients[0].device, indices)
    runs = runs or matrices
    bases = [
        [stream_base(seed, tensor_key(f"p{number}"), stream) for stream in variant.streams]
        for number in range(n)
    ]
    bucket = Bucket(
        variant=variant,
        planes=planes,
        numels=np.array(sizes, np.int64),
        offsets=np.array(offsets, np.int64),
        widths=np.array([w for w, _ in runs] if runs else np.maximum(sizes, 1), np.int64),
        pitches=np.array([p for _, p in runs] if runs else np.maximum(sizes, 1), np.int64),
        bases=np.array(bases, np.uint32).reshape(n, len(variant.streams), 2),
        totals=Totals.of_whole(np.array(sizes), torch.device(device)) if rule.statistic else None,
    )
    return bucket, gradients


def beside(tensor):
    """A copy that starts one element after an aligned address."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].copy_(tensor)


def poison(bucket, gradients):
    """Every kind of NaN, Inf and zero, the largest and the smallest numbers, in every plane."""
    patterns = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7F800000, 0xFF800000, 0x80000000]
    patterns += [0x7F7FFFFF, 0xFF7F8000, 0x7F7F0001, 0x7FC00000, 1, 0x807FFFFF, 0x00008000, 0x7F81]
    rng = np.random.default_rng(5)
    tensors = [t for each in bucket.planes for planes in each for t in planes]
    for tensor in [*tensors, *gradients]:
        drawn = torch.from_numpy(
            rng.choice(patterns, tensor.numel()).astype(np.uint32).view(np.int32)
        )
        halves = (drawn >> torch.from_numpy(rng.choice([0, 16], tensor.numel()))).to(torch.int16)
        raw = {1: halves.to(torch.int8), 2: halves, 4: drawn}[tensor.itemsize]
        tensor.view(raw.dtype).copy_(raw)


def inputs_of(bucket, gradients, step):
    """What a kernel call of that step is given."""
    rule, n = bucket.variant.rule, len(bucket.numels)
    row = rule.scalars(rule.options(HYPER), step, HYPER["scale"])
    table = np.array([row], np.float64).astype(np.float32)
    return KernelInputs(
        gradients, ScalarRows(np.full(n, step, np.int64), np.zeros(n, np.int64), table)
    )


def assert_other_bases_stand_in(backend):
    """A call that is given other base words does what a kernel loaded for them does."""
    case = "adamw", "stochastic", torch.bfloat16, [0] * len(SIZES)
    (changing, gradients), (fixed, _) = make_case(*case), make_case(*case)
    kernel = backend.load(changing)
    for step, seed in enumerate((None, 8, 9, 9, None), start=1):
        bases = None if seed is None else make_case(*case, seed=seed)[0].bases
        inputs = inputs_of(fixed, gradients, step)
        backend.load(fixed if bases is None else replace(fixed, bases=bases))(inputs)
        kernel(inputs._replace(bases=bases))
        for ours, theirs in zip(changing.planes, fixed.planes, strict=True):
            for (one,), (other,) in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(bits(one), bits(other))


def bits(tensor):
    raw = tensor.contiguous().cpu()
    return raw.view(SIGNED[raw.itemsize]).numpy()


def oracle_planes(tensors):
    """Copies in the oracle's dtypes: bf16 as uint16."""
    return tuple(bits(t).copy().view(OF_ORACLE[t.dtype]) for t in tensors)


def assert_oracle_agrees(case, backend, steps, offsets, runs=None, matrices=None):
    """``case`` is what :func:`make_case` gave for the same offsets, runs and matrices."""
    bucket, gradients = case
    rule, kernel = bucket.variant.rule, backend.load(bucket)
    roles = ["weight", *(state.name for state in rule.states)]
    formats = dict(zip(roles, (f.name for f in bucket.variant.formats), strict=True))
    expected = [
        dict(zip(roles, (oracle_planes(each) for each in planes), strict=True))
        for planes in bucket.planes
    ]
    for step in steps:
        inputs = inputs_of(bucket, gradients, step)
        if bucket.totals is not None:
            bucket.totals.sums.zero_()
            kernel.measure(inputs)
        kernel(inputs)
        for number, planes in enumerate(bucket.planes):
            (gradient,) = oracle_planes([gradients[number]])
            expected[number] = oracle.optimizer_step(
                rule.name, formats, expected[number], gradient, HYPER,
                seed=7, name=f"p{number}", step=step, start=offsets[number],
                run=runs[number] if runs else None, matrix=matrices[number] if matrices else None,
            )  # fmt: skip
            for role, tensors in zip(roles, planes, strict=True):
                for want, got in zip(expected[number][role], tensors, strict=True):
                    want = np.asarray(want)
                    raw = want.view(f"i{want.itemsize}")
                    got_bits = bits(got)
                    # Which NaN an operation makes is the processor's choice; that it is one, is
                    # not.
                    nan = np.isnan(got.float().cpu().numpy()) if got.is_floating_point() else False
                    is_nan = (
                        np.isnan(oracle_formats.bf16_to_fp32(want))
                        if want.dtype == np.uint16
                        else (np.isnan(want) if want.dtype == np.float32 else False)
                    )
                    np.testing.assert_array_equal(nan, is_nan)
                    same = (raw == got_bits) | nan
                    if got.dtype in (torch.int16, torch.int8):
                        same |= np.isnan(tensors[0].float().cpu().numpy())
                    assert same.all(), (role, number, step, np.flatnonzero(~same)[:5])

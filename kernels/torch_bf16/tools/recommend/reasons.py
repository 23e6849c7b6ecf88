"""Why a recipe is recommended, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .verdict import LEARNED

__all__ = ["megabytes", "reasons"]

_SENSITIVE = 0.02
_HARDLY_ANY = 0.0005


def reasons(content: Mapping[str, Any]) -> list[str]:
    """Write the sentences for a record that is otherwise complete."""
    rows = {each["name"]: each for each in content["recipes"]}
    chosen = rows[content["recommended"]]
    found = [_nearest(content, rows["bf16-true"])]
    smaller = [each for each in content["recipes"] if each["loses"] and each["noise"] is not None]
    found += [_loses(content, each) for each in smaller if each is not chosen]
    found.append(_answer(content, chosen, rows["32-true"]))
    found += _first_step(content, chosen)
    found += _ranges(content["ranges"])
    return found


def _nearest(content: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    return (
        f"a step moves weights by {content['spacings_per_step']:.2g} of their bf16 spacings on "
        f"average: rounded to nearest, as bf16-true does, {row['lost_updates']:.0%} of the updates "
        "are lost at this rate"
    )


def _loses(content: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    rate = row["loses_below_lr"]
    below = "" if rate is None else f"; from lr {rate:.2g} on it would not"
    total = content["total_steps"]
    needed = content["thresholds"]["distance"]
    if row["distance"] < needed:
        return (
            f"in {row['name']} rounding noise is {row['noise']:.1%} of what weights learn in "
            f"{total:,} steps (S = {row['distance']:.3g}, and {LEARNED:.1%} of the improvement "
            f"need {needed:.0f}): it loses{below}"
        )
    return (
        f"in {row['name']} {row['worst_layer']} moves less than "
        f"{content['thresholds']['layer_distance']:.0f} spacings: it loses there{below}"
    )


def _answer(content: Mapping[str, Any], chosen: Mapping[str, Any], exact: Mapping[str, Any]) -> str:
    saved = f"{chosen['bytes'] / exact['bytes']:.0%} of the memory of fp32"
    if chosen["distance"] is None:
        bits = "its masters have every bit of fp32, so that no update is rounded away"
        if chosen["name"] == "bf16+16":
            bits += ", beside the moments of bf16-stochastic; bf16-fp32-master has fp32's, too"
        none = "no matrix is rounded: all is fp32 or has exact masters in every recipe"
        why = bits if chosen["weights"] == "bf16+16" else none
    else:
        why = f"rounding noise is {chosen['noise']:.2%} of what weights learn"
        if chosen["loses_below_lr"] is not None:
            why += f", and it begins to lose below lr {chosen['loses_below_lr']:.2g}"
    return f"RECOMMENDED: {content['recommended']}, with {saved}: {why}"


def _first_step(content: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[str]:
    """A recipe that takes more later on, but less while the bits live that the cast set aside."""
    peak = chosen["peak_bytes"]
    for each in content["recipes"]:
        if each["weights"] and not each["loses"] and each["peak_bytes"] < peak:
            return [
                f"the first step of {chosen['name']} peaks at {megabytes(peak)} MB, because it "
                f"still holds what the cast set aside, and that of {each['name']}, which loses "
                f"nothing either, at {megabytes(each['peak_bytes'])} MB: take the latter if "
                f"activations hold less than {megabytes(peak - each['bytes'])} MB"
            ]
    return []


def megabytes(value: int) -> str:
    """Format bytes in MB of 10^6 bytes."""
    return f"{value / 1e6:,.{0 if value >= 1e8 else 2}f}"


def _ranges(found: Mapping[str, Any]) -> list[str]:
    sentences, formats = [], found["formats"]
    fp16, bf16 = formats["fp16"], formats["bf16"]
    zero, scaled = fp16["gradients_to_zero"], fp16["scaled_to_zero"]
    trouble = f"would round {zero:.1%} of the gradients to zero ({scaled:.1%} with the best loss "
    trouble = f"{trouble}scale)" if zero >= _HARDLY_ANY else "would lose hardly any gradient"
    if infinite := fp16["overflows"]:
        trouble += f", and overflows in {', '.join(infinite[:3])}"
    sentences.append(f"fp16 {trouble}; bf16 and TF32 have the range of fp32")
    if worst := bf16["worst_product"]:
        name, error = worst
        line = (
            f"products of bf16 numbers are off by {bf16['product_error']:.2%} (TF32: "
            f"{formats['tf32']['product_error']:.3%}), at most {error:.2%}, in {name}"
        )
        if error > _SENSITIVE:
            line += f': its terms cancel, so keep it in fp32, keep_fp32=("{name}",)'
        sentences.append(line)
    return sentences

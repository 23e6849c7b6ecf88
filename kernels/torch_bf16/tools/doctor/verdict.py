"""Judge an examination, and explain the verdict in sentences."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch_bf16.tools.sampling import STALLING, kind_of

from .examination import Examination, Examined, lacks_bits

__all__ = ["Finding", "Verdict", "judge"]

STALLS, BROKEN, LOSES, STANDS = "stalls", "broken", "loses", "stands still"
UNSEEN, UNJUDGED, FINE = "not seen", "not judged", "learns"
_BAD = (STALLS, BROKEN)
_LOSING = 0.9
_HARDLY = 0.9  # the share of elements that stand, from which on few have moved
_MOST_KINDS = 8
_STEPS = 100_000  # assumed if their number is unknown


@dataclass(frozen=True)
class Finding:
    """The verdict on one weight.

    Attributes:
        weight: the weight.
        verdict: ``"stalls"``, ``"broken"``, ``"loses"``, ``"stands still"`` (frozen, or without a
            gradient: not by rounding), ``"not seen"`` (no bf16 number moved, and it has an exact
            master that one of the checkpoints lacks, or bits that cannot be read here),
            ``"not judged"`` (one checkpoint, which does not say what its next update is, or how it
            is rounded; or two between which few elements moved) or ``"learns"``.
        lost: the share missing of the distance that it should move; None if it was not judged.
        why: the evidence: ``"size"``, ``"gain"``, ``"state"``, ``"rounding"``, ``"few"`` or empty.
    """

    weight: Examined
    verdict: str
    lost: float | None
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    Attributes:
        findings: of all weights, worst first.
        sentences: for people, worst first.
        healthy: whether nothing stalls and nothing is broken; None if that cannot be told.
    """

    findings: list[Finding]
    sentences: list[str]
    healthy: bool | None


def judge(found: Examination) -> Verdict:
    """Judge a run by how its weights moved and by the next update of its optimizer."""
    references = [each.movement.reference for each in found.weights]
    known = [each for each in references if each is not None]
    usual = statistics.median(known) if known else None
    gains = _gains_stand_still(found, usual)
    # bf16 weights that were saved in fp32 are all bf16 numbers; a single weight may be by chance.
    all_rounded = all(each.movement.rounded for each in found.weights)
    findings = [_finding(each, found.compared, gains, all_rounded) for each in found.weights]
    order = (BROKEN, STALLS, LOSES, STANDS, UNSEEN, UNJUDGED, FINE)
    findings.sort(key=lambda each: (order.index(each.verdict), -(each.lost or 0.0)))
    kinds: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for each in findings:
        kinds[each.verdict, each.why, kind_of(each.weight.name)].append(each)
    unusual = [each for each in kinds.items() if each[0][0] != FINE]
    sentences = [_sentence(*key, members, found, usual) for key, members in unusual[:_MOST_KINDS]]
    if more := unusual[_MOST_KINDS:]:
        count = sum(len(members) for _, members in more)
        sentences.append(f"and {count} more weights of {len(more)} other kinds")
    bad = any(each.verdict in _BAD for each in findings)
    unchanged = found.compared and not any(each.weight.movement.moved for each in findings)
    unseen = unchanged and any(each.verdict == UNSEEN for each in findings)
    if unchanged and not unseen:
        sentences.insert(0, "not one element differs: the same checkpoint twice, or nothing learns")
    sentences.append(_summary(findings, found, bad or unchanged))
    healthy = not bad and not unchanged
    unjudged = _hardly_moved(findings) or all(each.verdict == UNJUDGED for each in findings)
    if not bad and (unseen or unjudged):
        healthy = None
    return Verdict(findings, sentences, healthy)


def _finding(each: Examined, compared: bool, gains: bool, all_rounded: bool) -> Finding:
    moved, plan = each.movement, each.next_update
    if moved.nan or moved.infinite:
        return Finding(each, BROKEN, (moved.nan + moved.infinite) / moved.numel)
    if plan is not None and plan.broken:
        return Finding(each, BROKEN, plan.broken / moved.numel, "state")
    # A weight with numbers that bf16 does not have was not rounded to it.
    nearest = all_rounded if each.dtype.itemsize > 2 else each.rounding in ("nearest", "unknown")
    rounded = moved.rounded and not each.master and nearest
    lost, why = 0.0, ""
    if compared and rounded:
        survived = moved.survived
        if survived is not None:
            lost, why = 1 - survived, "size"
        elif gains and not (each.frozen or each.hidden) and moved.ones_before == moved.numel:
            lost, why = 1.0, "gain"
    if 1 - lost < STALLING:
        return Finding(each, STALLS, lost, why)
    if plan is not None and each.rounding == "nearest" and plan.survived < _LOSING:
        # A weight that has moved so far, and stops only now that the rate is low, has learned.
        learned = why == "size" and 1 - lost > _LOSING
        stalls = plan.survived < STALLING and not learned
        return Finding(each, STALLS if stalls else LOSES, 1 - plan.survived, "state")
    if compared and not moved.moved:
        unseen = each.hidden or lacks_bits(each)
        return Finding(each, UNSEEN if unseen else STANDS, 0.0)
    unclear = each.rounding == "unknown" or (each.rounding == "nearest" and plan is None)
    few = rounded and moved.reference is None and moved.unmoved > _HARDLY
    if unclear and compared and few:
        return Finding(each, UNJUDGED, None, "few")
    if unclear and not compared:
        return Finding(each, UNJUDGED, None, "state" if plan is None else "rounding")
    return Finding(each, LOSES if 1 - lost < _LOSING else FINE, lost, why)


def _hardly_moved(findings: Sequence[Finding]) -> bool:
    """Whether that few elements moved leaves open how most elements of a run are rounded."""
    sizes = [(each.weight.movement.numel, each.why) for each in findings]
    return sum(n for n, why in sizes if why == "few") > sum(n for n, _ in sizes) / 2


def _gains_stand_still(found: Examination, usual: float | None) -> bool:
    """Whether none of the gains that were 1.0 moved, while other weights moved far enough to show.

    All gains of a model are checked together, because in a bf16 copy of weights that do learn, few
    of them move in a short run. Those that no optimizer updates show nothing.
    """
    trained = [each.movement for each in found.weights if not each.frozen]
    gains = [each for each in trained if each.ones_before == each.numel]
    if not found.compared or usual is None or not gains:
        return False
    return not any(each.moved for each in gains) and usual > gains[0].half_spacing / 4


def _sentence(
    verdict: str,
    why: str,
    kind: str,
    members: Sequence[Finding],
    found: Examination,
    usual: float | None,
) -> str:
    weights = [each.weight for each in members]
    numel = sum(each.movement.numel for each in weights)
    moved = sum(each.movement.moved for each in weights)
    several = f"{len(weights)} x {kind}" if len(weights) > 1 else kind
    during = "" if found.steps is None else f" in {found.steps:,} steps"
    if verdict == BROKEN and why == "state":
        broken = sum(each.next_update.broken for each in weights if each.next_update is not None)
        return (
            f"{several} is broken: its optimizer's state is not finite, or makes no finite update, "
            f"in {broken:,} of {numel:,} elements"
        )
    if verdict == BROKEN:
        nan = sum(each.movement.nan for each in weights)
        infinite = sum(each.movement.infinite for each in weights)
        return f"{several} is broken: {nan:,} NaN and {infinite:,} infinities of {numel:,} numbers"
    if verdict == STANDS:
        # Frozen if the others' distance, even spread over all steps, would move its finest element.
        least = (usual or 0.0) / max(found.steps or 0, _STEPS)
        fine = all(w.frozen or not w.movement.rounded or w.movement.finest < least for w in weights)
        why = ", and not by rounding: it is frozen, or no gradient reaches it"
        if not fine:
            half = f"half a bf16 spacing, {_half(weights):.2g}"
            why = f": it is frozen, or each update is below {half}"
        return f"{several} has not moved{during}{why}"
    if verdict == UNSEEN:
        why = "it has an exact master, and only one of the two checkpoints has that"
        if not any(each.master for each in weights):
            why = "only one of the two checkpoints has it in fp32"
        if all(each.hidden for each in weights):
            why = "its optimizer keeps its lost bits in a form that cannot be read here"
        return f"{several}: none of its bf16 numbers changed{during}, which proves nothing: {why}"
    if verdict == UNJUDGED and why == "few":
        return (
            f"{several} was not judged: {1 - moved / numel:.1%} of {numel:,} elements have not "
            f"moved{during}, and too few have to tell what rounding took"
        )
    if verdict == UNJUDGED:
        fault = "its optimizer's state, if any, does not determine the next update"
        if why == "rounding":
            fault = "the checkpoint does not say how it was rounded"
        return f"{several} was not judged: {fault}. Give an earlier checkpoint, too"
    lost = max(each.lost or 0.0 for each in members)
    word = "stalls" if verdict == STALLS else "loses updates"
    if why == "gain":
        return (
            f"{several} stalls: all {numel:,} gains are exactly 1.0, as they were{during}, while "
            f"small weights moved by {usual or 0:.2g}; a bf16 number at 1.0 does not move for less "
            f"than {_half(weights) / 2:.2g} in one step"
        )
    if why == "size":
        at = [each.movement.standing for each in weights]
        sizes = [each for each in at if each is not None]
        above = f"; those from {min(sizes):.2g} on stand still" if sizes else ""
        return (
            f"{several} {word}: {1 - moved / numel:.0%} of {numel:,} elements have not moved"
            f"{during}, and {lost:.0%} of the distance that small elements moved is missing"
            f"{above}. Updates are below half a bf16 spacing, {_half(weights):.2g} on average there"
        )
    plans = [each.next_update for each in weights if each.next_update is not None]
    update = statistics.fmean(each.update for each in plans)
    below = sum(p.below * w.movement.numel for p, w in zip(plans, weights, strict=True)) / numel
    return (
        f"{several} {word}: {lost:.0%} of its next update would be lost. At lr {plans[0].lr:.3g} "
        f"that is {update:.2g}, half a bf16 spacing {_half(weights):.2g}: {below:.0%} of {numel:,} "
        "elements would not change"
    )


def _half(weights: Sequence[Examined]) -> float:
    return statistics.fmean(each.movement.half_spacing for each in weights)


def _summary(findings: Sequence[Finding], found: Examination, bad: bool) -> str:
    broken = [each for each in findings if each.verdict == BROKEN]
    stalled = [each for each in findings if each.verdict == STALLS]
    numel = sum(each.weight.movement.numel for each in findings)
    share = sum(each.weight.movement.numel for each in stalled) / numel
    when = "over" if found.compared else "after"
    during = "" if found.steps is None else f" {when} {found.steps:,} steps"
    if stalled:
        return (
            f"VERDICT: {len(stalled)} of {len(findings)} weights ({share:.0%} of all elements) "
            f"stall{during}: bf16, rounded to nearest, loses their updates. What keeps them: "
            "accelerate launch --mixed_precision bf16-fp32-master ..., Lightning's "
            'Trainer(precision="bf16-fp32-master"), or torch_bf16.prepare(model, optimizer, '
            '"bf16-fp32-master"); "bf16-stochastic" instead if memory is tight; or fp32 '
            "weights under autocast"
        )
    if broken:
        own = " or their optimizer's states" if any(each.why for each in broken) else ""
        return f"VERDICT: {len(broken)} of {len(findings)} weights{own} hold NaN or infinities"
    unseen = [each.weight for each in findings if each.verdict == UNSEEN]
    if unseen and bad and all(each.hidden for each in unseen):
        return (
            "VERDICT: these two checkpoints cannot tell: no bf16 number changed, and the optimizer "
            "keeps the lost bits in a form that cannot be read here. Give two checkpoints that lie "
            "further apart"
        )
    if unseen and bad:
        return (
            "VERDICT: these two checkpoints cannot tell: no bf16 number changed, and one of them "
            "lacks the exact numbers. Give two checkpoints with their optimizer's state"
        )
    if bad:
        return "VERDICT: nothing was learned between the two"
    if _hardly_moved(findings):
        return (
            "VERDICT: these two checkpoints cannot tell: most elements have not moved, and too few "
            "have to tell what rounding took. Give two checkpoints that lie further apart, or the "
            "optimizer's state"
        )
    unjudged = sum(each.verdict == UNJUDGED for each in findings)
    if unjudged == len(findings):
        unknown = all(each.why == "rounding" for each in findings)
        lacks = "how its weights were rounded" if unknown else "what its next update is"
        return (
            f"VERDICT: one checkpoint is not enough: it does not say {lacks}. "
            "Give an earlier one, too"
        )
    seen = "it moved as it should" if found.compared else "no update would be lost to rounding"
    standing = sum(each.verdict == STANDS for each in findings)
    rest = f"; {standing} of {len(findings)} weights have not moved" if standing else ""
    rest += f"; {unjudged} of {len(findings)} weights were not judged" if unjudged else ""
    return f"VERDICT: no weight stalls{during}: {seen}{rest}"

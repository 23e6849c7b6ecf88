"""What installed distributions need and bring."""

from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(distribution: str, extra: str = "") -> set[Requirement]:
    """What a distribution asks for here, or one of its extras does."""
    asked = map(Requirement, metadata.requires(distribution) or ())
    return {each for each in asked if not each.marker or each.marker.evaluate({"extra": extra})}


def asked_for_by_tests() -> set[str]:
    """Canonical names of what ``pip install -e .[all,dev]`` asks for."""
    asked = needed("torch-bf16", "all") | needed("torch-bf16", "dev")
    return {canonicalize_name(each.name) for each in asked}


def modules_beside(distribution: str) -> set[str]:
    """Top-level modules of what is installed and not needed by a distribution, however far down."""
    left, found = [distribution], set()
    while left:
        if (name := canonicalize_name(left.pop())) not in found:
            found.add(name)
            left += [each.name for each in needed(name)]
    owners = metadata.packages_distributions()
    return {each for each in owners if found.isdisjoint(map(canonicalize_name, owners[each]))}

"""Write the digests that certificates compare with, from the NumPy oracle alone.

python tests/proofs/digests.py --rules lion   of these rules, seconds for each: where one is new
python tests/proofs/digests.py                of all, 4 minutes: where a format or the trial changes
python tests/proofs/digests.py --planted      see that faults are found in every variant; --rules
                                              and --places name some
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from certificate_digests import digests_by_the_oracle, variants
from every_rule import RULES
from planted_faults import PLACES, Planted, shows

from torch_bf16.backends.certificates import certificate
from torch_bf16.backends.certificates.digests import FILE
from torch_bf16.backends.certificates.trial import Trial


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--rules", nargs="+", default=[*RULES], choices=[*RULES])
    parser.add_argument("--places", nargs="+", choices=PLACES)
    options = parser.parse_args()
    if options.planted:
        missed = sum([planted(rule, options.places or PLACES) for rule in options.rules])
        return 1 if missed else 0
    if options.places:
        parser.error("--places needs --planted: digests have no faults")
    computed = [variant for rule in options.rules for variant in variants(rule)]
    others = {v.name for rule in {*RULES} - {*options.rules} for v in variants(rule)}
    lines = [line for line in FILE.read_text().splitlines(True) if line.split()[0] in others]
    lines += [f"{v.name} {' '.join(digests_by_the_oracle(v))}\n" for v in computed]
    FILE.write_text("".join(sorted(lines)))
    print(f"{len(computed)} of {len(lines)} variants computed, {FILE.stat().st_size} bytes")
    return 0


def planted(rule, places):
    """How many faults certificates of a rule have missed; prints so at once, as all take long."""
    missed = tried = 0
    for variant in (every := [*variants(rule)]):
        trial = Trial.of(variant)
        for place in places:
            if shows(place, variant):
                tried += 1
                if certificate._load_kernels(Planted(place), trial)() is None:
                    missed += 1
                    print(f"missed: {place} in {variant.name}")
    print(f"{rule}: {tried} planted faults in {len(every)} variants, {missed} missed", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())

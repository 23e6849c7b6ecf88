"""Write the digests that certificates compare with, from the NumPy oracle alone.

python tests/proofs/digests.py             needed where a rule, a format or the trial is changed
python tests/proofs/digests.py --planted   see that faults are found in every variant; --rules and
                                           --places name some
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from certificate_digests import digests_by_the_oracle, variants
from every_rule import RULES
from planted_faults import PLACES, Planted, shows

from torch_bf16.backends.certificates import certificate
from torch_bf16.backends.certificates.digests import FILE, key_of
from torch_bf16.backends.certificates.trial import Trial


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--rules", nargs="+", default=[*RULES], choices=[*RULES])
    parser.add_argument("--places", nargs="+", default=PLACES, choices=PLACES)
    options = parser.parse_args()
    if options.planted:
        missed = sum([planted(rule, options.places) for rule in options.rules])
        return 1 if missed else 0
    every = [variant for rule in RULES for variant in variants(rule)]
    lines = [f"{key_of(v)} {' '.join(digests_by_the_oracle(v))}\n" for v in every]
    FILE.write_text("".join(sorted(lines)))
    print(f"{len(lines)} variants, {FILE.stat().st_size} bytes")
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
                    print(f"missed: {place} in {key_of(variant)}")
    print(f"{rule}: {tried} planted faults in {len(every)} variants, {missed} missed", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())

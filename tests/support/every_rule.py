"""Every elementwise rule by its name."""

from torch_bf16 import rules

RULES = {
    each.name: each
    for each in vars(rules).values()
    # Elementwise, Adafactor's are Muon's.
    if isinstance(each, rules.Rule) and "adafactor" not in each.name
}

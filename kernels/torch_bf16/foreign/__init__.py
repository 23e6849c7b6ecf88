"""The conversion of optimizers, and steps by an optimizer's own code on fp32 copies."""

"""Number ranges: the powers of two that a training's tensors use, range faults, and the loss scale."""

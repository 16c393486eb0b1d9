"""Every matrix product that a model computes in one forward and backward, recorded below autograd, mostly without its weights."""

"""Record every matrix product of a model's forward and backward, below autograd and mostly without the weights' values."""

"""Every matrix product that a model computes in one forward and backward, recorded below autograd, mostly without its weights."""

from mpinspect.shapes.record.recording import record_matmuls

__all__ = ["record_matmuls"]

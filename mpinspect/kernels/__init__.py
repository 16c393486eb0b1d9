"""Answer "Did Tensor Cores run?": record and read torch.profiler's traces, judge kernels by name, report on both."""

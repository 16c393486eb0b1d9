""" "Did Tensor Cores run?": records and reads torch.profiler's traces, judges kernels by their names, reports on both."""

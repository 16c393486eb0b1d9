""" "Did Tensor Cores run?": traces of torch.profiler, what kernels' names tell, how both are judged and reported."""

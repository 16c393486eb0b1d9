"""A training step under torch.profiler, its modules marked."""

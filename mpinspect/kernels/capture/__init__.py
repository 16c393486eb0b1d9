"""Records a training step with torch.profiler, with named ranges around its modules."""

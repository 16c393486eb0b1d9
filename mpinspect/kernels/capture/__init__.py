"""Record a training step with torch.profiler, with named ranges around the model's modules."""

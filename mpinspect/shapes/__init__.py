"""Check whether shapes suit Tensor Cores: record a model's matrix products, judge them and report the result."""

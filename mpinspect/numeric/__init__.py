"""Number formats and the histogram of exponents: what everything else is computed from."""

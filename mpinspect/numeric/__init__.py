"""Number formats and exponent histograms, from which everything else is computed."""

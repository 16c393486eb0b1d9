"""What the counts of a session say: ranges, noise, the loss scale, the formats that fit. Pure functions; no torch, no GPU."""

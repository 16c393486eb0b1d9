"""Pure functions of a session's counts: ranges, noise, the loss scale, the formats that fit. No torch, no GPU."""

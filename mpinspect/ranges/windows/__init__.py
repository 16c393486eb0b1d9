"""The counts of a run: one tensor's, those of a window of steps as columns, and their sums."""

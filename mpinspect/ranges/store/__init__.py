"""Sessions on disk and in columns: what keeps a run of any length."""

"""The capture of arrays that the caller passes to a recorder, without torch and hooks."""

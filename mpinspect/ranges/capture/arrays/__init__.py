"""What a recorder makes of arrays that it is handed: no torch, no hooks."""

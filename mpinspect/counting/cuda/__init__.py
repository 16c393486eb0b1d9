"""Counting on an NVIDIA GPU with Triton. Import ``counter`` only where it is used, since importing it loads Triton."""

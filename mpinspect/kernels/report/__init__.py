"""Render a KernelReport in every form."""

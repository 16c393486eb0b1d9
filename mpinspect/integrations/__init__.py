"""Thin adapters for trainers that own the training loop: Lightning's and Transformers'."""

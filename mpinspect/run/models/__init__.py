"""Finds the models that a script trains, and inspects them. Imports torch, so it is loaded once the script has imported that."""

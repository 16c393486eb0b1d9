"""Finds and inspects the models that a script trains. Imports torch, so it is loaded only after the script did so."""

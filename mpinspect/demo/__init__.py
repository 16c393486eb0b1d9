"""The demo: trains a small real model with the inspector on, then in FP16 with and without loss scaling."""

"""The demo: trains a real small model with the inspector on, then in FP16 with and without loss scaling."""

"""A real small model, trained with the inspector on, then in FP16 with and without loss scaling."""

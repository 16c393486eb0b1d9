"""Callbacks for the trainers of Lightning and Transformers, which run the training loop themselves."""

"""Render a ShapeReport in every form."""

"""What a ShapeReport says, in every form."""

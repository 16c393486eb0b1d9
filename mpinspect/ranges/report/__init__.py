"""What a RangeReport says, in every form."""

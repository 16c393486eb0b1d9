"""The contents of a RangeReport in every output form."""

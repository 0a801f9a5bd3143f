"""Observed runs -> predictions, errors and fitted constants."""

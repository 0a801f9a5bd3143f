"""Strict reading of YAML documents with file:line:column in every error.

`read_document` loads a file safely and returns the `Fields` of its root mapping. A reader takes each key it knows
with a typed method and calls `finish()`, which refuses keys nobody asked for, with a near match.
"""

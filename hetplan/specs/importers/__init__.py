"""Readers of files that other tools wrote, one format a file."""

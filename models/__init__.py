"""Architectures, each a short assembly of shared blocks."""

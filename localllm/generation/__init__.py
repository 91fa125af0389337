"""Texts, scores and vectors of a loaded model."""

"""Generates text, scores and embeddings with a loaded model."""

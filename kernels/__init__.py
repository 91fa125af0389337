"""The operations a model is made of, and their backends."""

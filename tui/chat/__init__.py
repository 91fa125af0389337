"""Conversations and generation, without any user interface."""

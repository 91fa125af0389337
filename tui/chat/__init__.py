"""Conversations and what happens in them; nothing here knows of a screen."""

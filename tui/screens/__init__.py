"""The chat's screens: the conversation, and the dialogs above it."""

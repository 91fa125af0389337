"""Parts of the chat's screens."""

"""The terminal chat: conversations, storage, commands, and the Textual and line-mode interfaces."""

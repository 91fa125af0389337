"""The terminal chat: conversations, where they are kept, and what people talk to a model through."""

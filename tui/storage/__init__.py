"""Storage: chats, and the history of prompts."""

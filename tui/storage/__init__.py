"""What is kept on disk: chats, and what was typed."""

"""A file for each command: its row, `COMMAND`, and what it does.  What is heavy is imported when it runs."""

"""One module per command, with its declaration (`COMMAND`).  Slow modules are imported at their use."""

"""How fast models run here, and how much of what the machine can do that is."""

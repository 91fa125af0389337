"""Options: declared once, checked, read from the settings file, and known by foreign names."""

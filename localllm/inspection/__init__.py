"""Tools that look inside a model: names of its values, traces, steering, and comparisons of two backends."""

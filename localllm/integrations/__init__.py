"""Integrations: plugins of other programs, and services on several machines."""

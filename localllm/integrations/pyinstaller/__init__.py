"""Hooks for PyInstaller, which finds ``hook-localllm.py`` with the entry point ``pyinstaller40``."""

from __future__ import annotations

import os


def hook_folders() -> list[str]:
    """Return the folder of the hook."""
    return [os.path.dirname(__file__)]

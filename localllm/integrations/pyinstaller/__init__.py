"""Hooks for PyInstaller, which finds ``hook-localllm.py`` by the entry point ``pyinstaller40``."""

from __future__ import annotations

import os


def hook_folders() -> list[str]:
    """The folder with the hook."""
    return [os.path.dirname(__file__)]

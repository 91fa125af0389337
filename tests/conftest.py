"""Tests do not see the settings of whoever runs them, and none fails for being slow."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

from localllm.settings import CONFIG_VARIABLE

os.environ[CONFIG_VARIABLE] = str(Path(__file__).with_name("no-settings.toml"))

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

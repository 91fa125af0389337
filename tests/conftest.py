"""Tests do not see the settings of whoever runs them."""

from __future__ import annotations

import os
from pathlib import Path

from localllm.settings import CONFIG_VARIABLE

os.environ[CONFIG_VARIABLE] = str(Path(__file__).with_name("no-settings.toml"))

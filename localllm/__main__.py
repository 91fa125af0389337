"""``python -m localllm``: runs the command ``localllm``."""

from __future__ import annotations

import sys

from localllm.cli.start import main

if __name__ == "__main__":
    sys.exit(main())

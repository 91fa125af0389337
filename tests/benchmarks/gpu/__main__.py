"""Start `tests.benchmarks.gpu.run`, after a list of missing packages, which may be optional."""

import sys

from tests.benchmarks.gpu.installed import missing

if __name__ == "__main__":
    if needs := missing():
        print(f"not installed, or with another version: {', '.join(needs)}", file=sys.stderr)
    from tests.benchmarks.gpu.run import main

    sys.exit(main())

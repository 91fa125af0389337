"""`tests.benchmarks.gpu.run`, where what it needs is installed."""

import sys

from tests.benchmarks.gpu.installed import missing

if __name__ == "__main__":
    if said := missing():
        sys.exit(said)
    from tests.benchmarks.gpu.run import main

    sys.exit(main())

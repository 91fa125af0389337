"""`tests.benchmarks.gpu.run`, which first says what is missing: it may do without some of that."""

import sys

from tests.benchmarks.gpu.installed import missing

if __name__ == "__main__":
    if said := missing():
        print(said, file=sys.stderr)
    from tests.benchmarks.gpu.run import main

    sys.exit(main())

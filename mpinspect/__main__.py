"""``python -m mpinspect``."""

import sys

from mpinspect.cli import main

if __name__ == "__main__":
    sys.exit(main())

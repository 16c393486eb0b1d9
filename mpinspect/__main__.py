"""``python -m mpinspect``."""

import sys

from mpinspect.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())

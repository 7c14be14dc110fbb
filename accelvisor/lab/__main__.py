"""``python -m accelvisor.lab``."""

from __future__ import annotations

import sys

from accelvisor.lab.commands import main

if __name__ == "__main__":
    sys.exit(main())

"""``python3 -m accelvisor.guest`` is ``accelguest``."""

from __future__ import annotations

import sys

from accelvisor.guest.cli import main

if __name__ == "__main__":
    sys.exit(main())

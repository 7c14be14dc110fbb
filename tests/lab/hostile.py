"""Runs in a guest: ``hostile.py BDF SECONDS`` writes anything anywhere into a function's registers
and window, as a guest that attacks its device. Prints how often.
"""

import mmap
import os
import random
import sys
import time

base = f"/sys/bus/pci/devices/{sys.argv[1]}"
with open(f"{base}/enable", "w") as enable:
    enable.write("1")
bars = []
for name in ("resource0", "resource2"):
    fd = os.open(f"{base}/{name}", os.O_RDWR | os.O_SYNC)
    bars.append(mmap.mmap(fd, os.fstat(fd).st_size))
dice = random.Random(5)
end = time.monotonic() + float(sys.argv[2])
count = 0
while time.monotonic() < end:
    bar = dice.choice(bars)
    at = dice.randrange(min(len(bar), 1 << 18) // 4) * 4
    bar[at : at + 4] = dice.choice((dice.randbytes(4), b"\0\0\0\0", b"\1\0\0\0", b"\xff" * 4))
    count += 1
print(count)

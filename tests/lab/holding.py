"""Runs in a guest: holds its function through vfio-pci and asks it for its MSI, round after round.

The command is one that the device refuses, so that it needs no state of before: each round enables
the queue, submits it and waits for the interrupt. What happened is in /root/rounds.
"""

from __future__ import annotations

import json
import os
import sys
import time

from accelvisor.abi.registers import (
    MAGIC,
    SQ_TAIL,
    QueueControl,
    QueueReg,
    QueueStatus,
    Reg,
    WindowLayout,
)
from accelvisor.guest.vfio import VfioTransport

WAIT_S = 5


def main() -> None:
    transport = VfioTransport(sys.argv[1])
    read, write = transport.read32, transport.write32
    layout = WindowLayout(read(Reg.QUEUES), read(Reg.RING_ENTRIES))
    entry, tail = layout.submission(0), layout.control(0) + SQ_TAIL

    def control(value: QueueControl, wanted: QueueStatus) -> None:
        # Written again each time round: the device may be another one by now.
        while read(Reg.QUEUE + QueueReg.STATUS) != wanted:
            write(Reg.QUEUE + QueueReg.CONTROL, value)

    seen = {"rounds": 0, "bad": 0, "lost": 0}
    while True:
        seen["bad"] += read(Reg.MAGIC) != MAGIC
        control(QueueControl.ENABLE, QueueStatus.ENABLED)
        write(Reg.INTERRUPT_CAUSE, 0xFFFF_FFFF)
        while transport.wait_interrupt(0):
            pass
        transport.window[entry : entry + 64] = b"\xff" * 64
        transport.window[tail : tail + 4] = (1).to_bytes(4, "little")
        write(Reg.DOORBELL, 1)
        seen["lost"] += not transport.wait_interrupt(WAIT_S)
        control(QueueControl.DISABLE, QueueStatus.DISABLED)
        seen["rounds"] += 1
        with open("/root/rounds.new", "w") as file:
            json.dump(seen, file)
        os.rename("/root/rounds.new", "/root/rounds")
        time.sleep(0.05)


if __name__ == "__main__":
    main()

"""Fuzz the vfio-user room: framing, bodies, both sessions, transcripts.

    python -m tests.fuzz.vfio_codec --seconds 600 [--seed N]

Starts from what QEMU really says (fixtures/vfio_user) and from every message that the client can
make, and mutates: bits, lengths, interesting numbers, splices, cuts, repeats. Allowed outcomes are
a reply, silence and ProtocolError. Anything else is a finding: an exception, a model that was
handed something it fails on (EIO), a descriptor that leaked. A finding prints the seed and the
round that reproduce it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import random
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from accelvisor.errors import ProtocolError
from accelvisor.vfio_user import features, messages
from accelvisor.vfio_user.client_session import ClientSession
from accelvisor.vfio_user.dma import DmaTable
from accelvisor.vfio_user.messages import DmaMap, DmaUnmap, IrqRequest, RegionWrite
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.negotiate import (
    Agreement,
    Capabilities,
    accept_version,
    own_capabilities,
    pack_version,
)
from accelvisor.vfio_user.protocol import Command, FeatureFlag
from accelvisor.vfio_user.requests import Completion
from accelvisor.vfio_user.session import ServerSession
from accelvisor.vfio_user.transcript import Said, read
from accelvisor.vfio_user.wire import FrameReader, Message, encode_command, encode_reply
from tests.vfio_user.sample import SampleDevice

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "vfio_user"
NUMBERS = (
    0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 0x7F, 0x80, 0xFF, 0xFFF, 0x1000, 0x1001, 0xFFFF,
    0x10000, 0x100000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, (1 << 64) - 0x1000,
)  # fmt: skip


def corpus() -> list[bytes]:
    """Whole messages: QEMU's own and one of every kind."""
    found: set[bytes] = set()
    for path in sorted(FIXTURES.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            found |= {r.raw for r in read(lines) if isinstance(r, Said) and len(r.raw) < 512}
    report = features.REPORT.pack(0, 1 << 20, 4096)
    made = {
        Command.VERSION: [pack_version(0, 1, own_capabilities())],
        Command.DMA_MAP: [messages.pack_dma_map(DmaMap(3, 0, 0x1000 * i, 0x1000)) for i in (1, 5)],
        Command.DMA_UNMAP: [
            messages.pack_dma_unmap(DmaUnmap(24, 0, 0x1000, 0x1000, 0, 0)),
            messages.pack_dma_unmap(DmaUnmap(64, 1, 0x1000, 0x1000, 4096, 8)),
            messages.pack_dma_unmap(DmaUnmap(24, 2, 0, 0, 0, 0)),
        ],
        Command.DEVICE_GET_REGION_IO_FDS: [messages.IO_FDS.pack(4096, 0, 0, 0)],
        Command.DEVICE_SET_IRQS: [
            messages.pack_set_irqs(IrqRequest(f, 1, 0, 1, b"\1")) for f in (0x21, 0x22, 0x24)
        ],
        Command.REGION_WRITE_MULTI: [messages.pack_write_multi([RegionWrite(0x40, 0, b"12")] * 3)],
        Command.DEVICE_FEATURE: [
            features.pack_feature(FeatureFlag.GET, 1, argsz=64),
            features.pack_feature(FeatureFlag.SET, 2, features.DEVICE_STATE.pack(3, 0)),
            features.pack_feature(FeatureFlag.SET, 6, features.pack_logging(4096, [(0, 1 << 20)])),
            features.pack_feature(FeatureFlag.SET, 7),
            features.pack_feature(FeatureFlag.GET, 8, report, argsz=4096),
            features.pack_feature(FeatureFlag.PROBE, 2),
        ],
        Command.MIG_DATA_READ: [features.pack_mig_data(size=4096)],
        Command.MIG_DATA_WRITE: [features.pack_mig_data(b"state")],
        Command.DMA_READ: [messages.DMA_ACCESS.pack(0x1000, 64)],
        Command.DMA_WRITE: [messages.DMA_ACCESS.pack(0x1000, 8) + bytes(8)],
    }
    for command, bodies in made.items():
        for body in bodies:
            found.add(encode_command(1, command, body))
            found.add(encode_reply(1, command, body))
    return sorted(found)


class Mutator:
    """Random changes that keep most of a message, so that it gets past the first check."""

    def __init__(self, dice: random.Random, seeds: list[bytes]) -> None:
        self.dice = dice
        self.seeds = seeds

    def message(self) -> bytes:
        """A message whose header mostly says its true length."""
        data = bytearray(self.dice.choice(self.seeds))
        for _ in range(self.dice.choice((0, 1, 1, 2, 4, 8))):
            self._change(data)
        if len(data) >= 8 and self.dice.random() < 0.9:
            struct.pack_into("<I", data, 4, len(data))
        return bytes(data)

    def _change(self, data: bytearray) -> None:
        dice = self.dice
        at = dice.randrange(len(data)) if data else 0
        kind = dice.randrange(8)
        if kind == 0 and data:
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 1 and data:
            data[at] = dice.randrange(256)
        elif kind in (2, 3):
            width = dice.choice((2, 4, 8))
            where = at // width * width
            number = dice.choice(NUMBERS) % (1 << 8 * width)
            data[where : where + width] = number.to_bytes(width, "little")
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data += bytes(dice.randrange(64))
        elif kind == 6:
            other = dice.choice(self.seeds)
            data[at:] = other[dice.randrange(len(other)) :]
        elif data:
            data[at:at] = data[at : at + dice.randrange(1, 16)]


class Target:
    """One thing that is fed; each has its own state and is renewed now and then."""

    def __init__(self, mutator: Mutator) -> None:
        self.mutator = mutator
        self.device = SampleDevice()
        self.session = self._new_session()

    def close(self) -> None:
        self.session.release()
        self.device.close()

    def _new_session(self) -> ServerSession:
        agreement = Agreement(peer_max_fds=16, write_multiple=True)
        return ServerSession(self.device, agreement=agreement)

    def server(self) -> bytes:
        """Requests to a session that has negotiated, descriptors beside them."""
        raw = self.mutator.message()
        if len(raw) < 16 or int.from_bytes(raw[4:8], "little") != len(raw):
            return raw
        fds = [os.eventfd(0) for _ in range(self.mutator.dice.choice((0, 0, 0, 1, 1, 2)))]
        if fds and self.mutator.dice.random() < 0.5:
            os.close(fds[0])
            fds[0] = os.memfd_create("fuzz")
            os.ftruncate(fds[0], 1 << 20)
        reply = self.session.handle(Message(raw, fds))
        if reply is not None:
            answer = Message(reply.data)
            if answer.errno == errno.EIO:
                raise AssertionError("the model failed")
        return raw

    def greeting(self) -> bytes:
        """First messages to sessions that have not negotiated."""
        raw = self.mutator.message()
        if len(raw) >= 16 and int.from_bytes(raw[4:8], "little") == len(raw):
            reply = ServerSession(self.device).handle(Message(raw))
            if reply is not None:
                Message(reply.data)
        return raw

    def stream(self) -> bytes:
        """Several messages in random cuts through a reader of either kind."""
        dice = self.mutator.dice
        data = b"".join(self.mutator.message() for _ in range(dice.randrange(1, 6)))
        reader = FrameReader(limit=1 << 16, first=dice.choice((16, 32, 4096)))
        at = 0
        try:
            while True:
                message = reader.buffered()
                if message is None:
                    if at == len(data):
                        break
                    space = reader.space()
                    count = min(len(space), dice.randrange(1, 100), len(data) - at)
                    space[:count] = data[at : at + count]
                    at += count
                    fds = [os.eventfd(0)] if dice.random() < 0.2 else []
                    message = reader.advance(count, fds)
                if message is not None:
                    message.close()
        finally:
            reader.close()
        return data

    def client(self) -> bytes:
        """Messages of a server to a client that has requests in flight."""
        memory: DmaTable[memoryview | None] = DmaTable()
        memory.add(0x1000, 0x1000, 3, memoryview(bytearray(0x1000)))
        session = ClientSession(memory)
        session.agreement = Agreement()
        for command in Command:
            session.command(command)
        raw = self.mutator.message()
        if len(raw) < 16 or int.from_bytes(raw[4:8], "little") != len(raw):
            return raw
        outcome = session.receive(Message(raw))
        if isinstance(outcome, Completion):
            self._parse_reply(outcome)
        elif outcome.data:
            Message(outcome.data)
        return raw

    def _parse_reply(self, done: Completion) -> None:
        body = done.body
        parsers: dict[int, Callable[[], object]] = {
            Command.VERSION: lambda: accept_version(body, Capabilities(), 1),
            Command.DEVICE_GET_INFO: lambda: messages.parse_device_info(body),
            Command.DEVICE_GET_REGION_INFO: lambda: messages.parse_region_info(body),
            Command.DEVICE_GET_REGION_IO_FDS: lambda: messages.parse_io_fds(body, (1, 2)),
            Command.DEVICE_GET_IRQ_INFO: lambda: messages.parse_irq_info(body),
            Command.DEVICE_FEATURE: lambda: features.parse_feature(body),
            Command.MIG_DATA_READ: lambda: features.parse_mig_data(body),
        }
        parsers.get(done.command, lambda: None)()

    def transcript(self) -> bytes:
        """Damaged lines of a transcript."""
        data = b'{"from":"client","id":4,"command":"DMA_MAP","body":"2000","bytes":48}'
        line = bytearray(data)
        self.mutator._change(line)
        list(read([line.decode("utf-8", "replace")]))
        return bytes(line)


def run(seconds: float, seed: int) -> int:
    """Fuzz; returns the number of findings (it stops at the first)."""
    logging.disable(logging.CRITICAL)
    dice = random.Random(seed)
    mutator = Mutator(dice, corpus())
    end = time.monotonic() + seconds
    counts: dict[str, int] = {}
    rounds = 0
    before = len(os.listdir("/proc/self/fd"))
    while time.monotonic() < end:
        target = Target(mutator)
        # The server has state to explore, so it gets the largest part.
        feeds = [target.server] * 4 + [target.greeting, target.stream, target.client]
        feeds.append(target.transcript)
        for _ in range(500):
            feed = dice.choice(feeds)
            try:
                feed()
                outcome = "answered"
            except (ProtocolError, Refusal):
                outcome = "refused"
            except Exception as error:
                print(f"FINDING in {feed.__name__}: {error!r} (seed {seed}, round {rounds})")
                raise
            key = f"{feed.__name__} {outcome}"
            counts[key] = counts.get(key, 0) + 1
            rounds += 1
        target.close()
        now = len(os.listdir("/proc/self/fd"))
        if now != before:
            print(f"FINDING: {now - before} descriptors leaked (seed {seed}, by round {rounds})")
            return 1
    for key, count in sorted(counts.items()):
        print(f"{count:>9}  {key}")
    print(f"{rounds} inputs in {seconds:g} s, seed {seed}: nothing found")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the vfio-user codec and sessions.")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    return run(options.seconds, seed)


if __name__ == "__main__":
    sys.exit(main())

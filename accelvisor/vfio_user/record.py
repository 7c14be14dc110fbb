"""Recording proxy: sits between a vfio-user client and its server and writes a transcript.

    python -m accelvisor.vfio_user.record --listen A --connect B --out FILE

Point QEMU at A and let a server listen at B. Each message is written when it has passed, so the
file is whole up to the last one whatever happens. Ends on SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from accelvisor.errors import AccelvisorError, ProtocolError, UnavailableError
from accelvisor.vfio_user.listen import Listener, listen
from accelvisor.vfio_user.passing import receive, send
from accelvisor.vfio_user.transcript import Connected, Ended, Record, Said, Side, marker, write_line
from accelvisor.vfio_user.wire import FrameReader

Sink = Callable[[Record], None]


def forward(client: socket.socket, server: socket.socket, sink: Sink) -> None:
    """Pass messages both ways until an end closes; then close both.

    Raises:
        ProtocolError: an end sent what is no message.
    """
    ends: dict[int, tuple[Side, socket.socket, socket.socket, FrameReader]] = {
        client.fileno(): ("client", client, server, FrameReader()),
        server.fileno(): ("server", server, client, FrameReader()),
    }
    poll = select.poll()
    for fd in ends:
        poll.register(fd, select.POLLIN)
    try:
        while True:
            for fd, _ in poll.poll():
                if not _pass(*ends[fd], sink):
                    return
    finally:
        for _, sock, _, reader in ends.values():
            reader.close()
            sock.close()


def _pass(
    side: Side, source: socket.socket, target: socket.socket, reader: FrameReader, sink: Sink
) -> bool:
    """Pass on what has arrived; False when ``source`` has closed."""
    while True:
        try:
            message = receive(source, reader)
        except ConnectionResetError:
            message = None
        if message is None:
            sink(Ended(side))
            return False
        try:
            sink(Said(side, message.raw, tuple(marker(fd) for fd in message.fds)))
            send(target, message.raw, message.fds)
        finally:
            message.close()
        if reader.is_idle:
            return True


def record(listener: Listener, target: str, out: TextIO) -> None:
    """Record one connection after the other until the listening socket is shut down."""

    def sink(entry: Record) -> None:
        out.write(write_line(entry) + "\n")
        out.flush()

    number = 0
    while True:
        try:
            client, _ = listener.socket.accept()
        except OSError:
            return
        number += 1
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.connect(target)
        except OSError as error:
            client.close()
            server.close()
            raise UnavailableError(
                f"cannot connect to {target}: {error.strerror}",
                code="vfio-user-gone", where="vfio-user record", hint="start the server first",
            ) from error  # fmt: skip
        sink(Connected(number))
        try:
            forward(client, server, sink)
        except (ProtocolError, OSError) as error:
            print(f"connection {number}: {error}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m accelvisor.vfio_user.record")
    parser.add_argument("--listen", required=True, metavar="A", help="socket for the client")
    parser.add_argument("--connect", required=True, metavar="B", help="socket of the server")
    parser.add_argument("--out", required=True, metavar="FILE", help="transcript to write")
    options = parser.parse_args(arguments)
    try:
        listener = listen(options.listen)
    except AccelvisorError as error:
        print(f"{error} ({error.code}); {error.hint}", file=sys.stderr)
        return 1
    stop = lambda *_: listener.socket.shutdown(socket.SHUT_RDWR)  # noqa: E731
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        with open(options.out, "w", encoding="utf-8") as out:
            record(listener, options.connect, out)
    except AccelvisorError as error:
        print(f"{error} ({error.code}); {error.hint}", file=sys.stderr)
        return 1
    finally:
        listener.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``accelctl migrate``, ``accelctl migration`` and ``accelctl host drain``.

Ctrl-C asks for a cancel, which the daemon refuses after the point of no return; Ctrl-C again stops
watching, and the migration goes on.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelvisor.cli import drawing, moves
from accelvisor.cli.commands import Session
from accelvisor.control.client import AdminClient
from accelvisor.errors import AccelvisorError

DONE, FAILED, UNCONVERGED, UNVERIFIED, DETACHED = 0, 1, 5, 6, 130
_CODES: Mapping[str, int] = {
    "moved": DONE,
    "cancelled": FAILED,
    "failed": FAILED,
    "unverified": UNVERIFIED,
    "unconverged": UNCONVERGED,
}
#: Longest silence of the daemon: libvirt itself may take its time before anything is to be seen.
_GAP_S = 120.0


class _Interrupts:
    """What Ctrl-C means while a migration is watched."""

    def __init__(self, session: Session) -> None:
        self._socket = session.socket
        self._json = session.options.json
        #: whose migration is shown; None while none is
        self.domain: str | None = None
        self.asked = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Only the main thread gets signals; in another one Ctrl-C is somebody else's business."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: self._interrupt())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self) -> None:
        if self.asked or self.domain is None:
            raise KeyboardInterrupt
        self.asked = True
        threading.Thread(target=self._cancel, args=(self.domain,), daemon=True).start()

    def _cancel(self, domain: str) -> None:
        sys.stderr.write("\naccelctl: cancelling; Ctrl-C again stops watching\n")
        try:
            with AdminClient(self._socket) as client:
                client.call("CancelMigration", {"domain": domain})
        except AccelvisorError as error:
            sys.stderr.write(f"accelctl: {error.message} [{error.code}]\n")


def migrate(session: Session) -> int:
    options = session.options
    given = {
        "domain": options.domain,
        "host": options.host,
        "uri": options.uri,
        "dry_run": options.dry_run,
        "downtime_ms": options.downtime,
        "bandwidth": options.bandwidth,
        "transient": options.transient,
    }
    interrupts = _Interrupts(session)
    with interrupts.caught():
        watching = _Watching(session, interrupts)
        try:
            for reply in session.client.stream("Migrate", given, gap_s=_GAP_S):
                interrupts.domain = options.domain
                watching.show(reply)
        except KeyboardInterrupt:
            return watching.detached()
        finally:
            watching.close()
    return watching.code


def drain(session: Session) -> int:
    """0 when nothing with a function is left; else 1, or the code of what went wrong."""
    options = session.options
    given = {"to": options.to, "uri": options.uri, "dry_run": options.dry_run}
    interrupts = _Interrupts(session)
    with interrupts.caught():
        watching = _Watching(session, interrupts)
        try:
            for reply in session.client.stream("DrainHost", given, gap_s=_GAP_S):
                if reply["domain"] is not None and not options.dry_run:
                    interrupts.domain = reply["domain"]
                watching.show(reply)
                if interrupts.asked and reply["report"] is not None:
                    break  # the others stay: nobody asks for them any more
        except KeyboardInterrupt:
            return watching.detached()
        finally:
            watching.close()
    if not watching.anything and not options.json:
        print("no function is on this host")
    return watching.code


class _Watching:
    """Shows replies as they come, and keeps what becomes the exit code."""

    def __init__(self, session: Session, interrupts: _Interrupts) -> None:
        self._json = bool(session.options.json)
        self._dry_run = bool(session.options.dry_run)
        self._interrupts = interrupts
        self._drawing: drawing.Drawing | None = None
        self.code = DONE
        self.anything = False

    def show(self, reply: Mapping[str, Any]) -> None:
        self.anything = True
        plan, progress, report = reply["plan"], reply["progress"], reply["report"]
        stay = reply.get("stay")
        if self._json:
            print(json.dumps(reply), flush=True)
        elif progress is not None:
            if self._drawing is None:
                self._drawing = drawing.choose()
            self._drawing.update(progress)
        if plan is not None:
            self._plan(plan)
        if report is not None:
            self._report(report)
        if stay is not None:
            self.code = self.code or FAILED
            if not self._json:
                print(moves.stay(stay), flush=True)

    def detached(self) -> int:
        self.close()
        sys.stderr.write("\naccelctl: the migration goes on; accelctl migration list shows it\n")
        return DETACHED

    def close(self) -> None:
        if self._drawing is not None:
            self._drawing.close()
            self._drawing = None

    def _plan(self, plan: Mapping[str, Any]) -> None:
        if self._dry_run and not plan["possible"]:
            codes = {item["code"] for item in plan["reasons"] if item["severity"] == "blocker"}
            self.code = UNCONVERGED if codes == {"migration-convergence"} else FAILED
        if self._json:
            return
        if self._dry_run:
            print(moves.plan(plan), flush=True)
            return
        for item in plan["reasons"]:
            if item["severity"] == "warning":
                sys.stderr.write(f"warning: {item['message']}\n")

    def _report(self, report: Mapping[str, Any]) -> None:
        self.close()
        self._interrupts.domain = None
        self.code = self.code or _CODES[report["outcome"]]
        if self._json:
            return
        print(moves.report(report), flush=True)
        if report["code"]:
            sys.stderr.write(f"accelctl: {report['message']} [{report['code']}]\n")
            if report["hint"]:
                sys.stderr.write(f"hint: {report['hint']}\n")


def list_all(session: Session) -> int:
    reply = session.call("ListMigrations")
    session.show(reply, lambda: moves.migrations(reply["migrations"]))
    return 0


def show(session: Session) -> int:
    reply = session.call("GetMigration", id=session.options.id)
    session.show(reply, lambda: moves.migration(reply["migration"]))
    return 0


def cancel(session: Session) -> int:
    domain = session.options.domain
    reply = session.call("CancelMigration", domain=domain)
    session.show(reply, lambda: f"the migration of VM {domain} is being ended: the VM stays here")
    return 0

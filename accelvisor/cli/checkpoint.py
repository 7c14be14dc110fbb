"""``accelctl checkpoint``: a function's state taken, looked at, restored, carried away.

Files are read and written here, by the caller's own rights: the daemon only sees their bytes.
"""

from __future__ import annotations

import base64
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from accelvisor.cli import render
from accelvisor.cli.commands import Session
from accelvisor.errors import ProtocolError, UsageError
from accelvisor.limits import LIMITS

DONE, UNVERIFIED = 0, 6
_WHERE = "accelctl"
#: Verifying 64 GiB takes minutes; writing them, too.
_LONG_S = 900.0


def create(session: Session) -> int:
    options = session.options
    reply = session.call(
        "CreateCheckpoint",
        reply_s=_LONG_S,
        function=options.function,
        label=options.label,
        parent=options.parent,
        follow=options.follow,
        compress=options.zstd,
        seal_for=options.seal_for,
        keep=options.keep,
    )
    session.show(reply, lambda: _one(reply["checkpoint"]))
    return DONE


def list_all(session: Session) -> int:
    reply = session.call("ListCheckpoints", function=session.options.function)
    session.show(reply, lambda: _table(reply["checkpoints"]))
    return DONE


def show(session: Session) -> int:
    reply = session.call("GetCheckpoint", reply_s=_LONG_S, checkpoint=session.options.checkpoint)
    session.show(reply, lambda: _shown(reply))
    return _judged(session, reply["report"])


def verify(session: Session) -> int:
    """A file, with a trust document or that of the daemon here; or one that the daemon keeps."""
    options = session.options
    if options.trust is None and not os.path.isfile(options.checkpoint):
        reply = session.call("VerifyCheckpoint", reply_s=_LONG_S, checkpoint=options.checkpoint)
    else:
        reply = {"report": _verify_file(session, options.checkpoint, options.trust)}
    session.show(reply, lambda: _report(reply["report"]))
    return _judged(session, reply["report"])


def restore(session: Session) -> int:
    options = session.options
    reply = session.call(
        "RestoreCheckpoint",
        reply_s=_LONG_S,
        checkpoint=options.checkpoint,
        function=options.function,
        rollback=options.rollback,
    )
    session.show(reply, lambda: render.function(reply["function"]))
    return DONE


def export(session: Session) -> int:
    options = session.options
    given = {"checkpoint": options.checkpoint, "host": options.host}
    stream = session.client.stream("ExportCheckpoint", given, gap_s=_LONG_S)
    head = next(stream, None)
    if head is None:
        raise _cut("nothing")
    with _new_file(options.file) as file:
        count = 0
        for reply in stream:
            count += file.write(base64.b64decode(reply["part"]))
        if count != head["bytes"]:
            raise _cut(f"{count} of {head['bytes']} bytes")
    said = {"file": options.file, "bytes": head["bytes"], "digest": head["digest"]}
    if options.file != "-":
        words = f"checkpoint {head['digest'][:16]} is in {options.file}"
        session.show(said, lambda: f"{words} ({render.size(head['bytes'])})")
    return DONE


def import_(session: Session) -> int:
    options = session.options
    with _open(options.file) as file:
        size = os.fstat(file.fileno()).st_size
        upload = session.call("BeginUpload", bytes=size)["upload"]
        left = size
        while left:
            data = file.read(min(left, LIMITS.checkpoint_part_bytes))
            if not data:
                raise UsageError(f"{options.file} got shorter meanwhile", where=_WHERE)
            part = base64.b64encode(data).decode()
            left = session.call("SendUpload", upload=upload, part=part)["left"]
    reply = session.call("ImportCheckpoint", reply_s=_LONG_S, upload=upload, label=options.label)
    session.show(reply, lambda: _one(reply["checkpoint"]))
    return DONE


def delete(session: Session) -> int:
    name = session.options.checkpoint
    reply = session.call("DeleteCheckpoint", checkpoint=name)
    session.show(reply, lambda: f"checkpoint {name} is deleted")
    return DONE


# --- files ----------------------------------------------------------------------------------------


def _verify_file(session: Session, path: str, trust: str | None) -> dict[str, Any]:
    from accelvisor.frames import report  # cryptography and msgspec: only here

    if trust is None:
        document = base64.b64decode(session.call("ExportTrust")["document"])
    else:
        with _open(trust) as stream:
            document = stream.read(LIMITS.trust_bytes + 1)
    keyring = report.offline_keyring(document)
    with _open(path) as file:
        return report.as_object(report.report(file, keyring, time.time_ns))  # type: ignore[arg-type]


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", where=_WHERE) from error


@contextmanager
def _new_file(path: str) -> Iterator[BinaryIO]:
    """There under its name when it is whole; of one that failed nothing is left."""
    if path == "-":
        yield sys.stdout.buffer
        return
    staged = f"{path}.new"
    try:
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                yield file
            os.replace(staged, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(staged)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", where=_WHERE) from error


def _cut(what: str) -> ProtocolError:
    return ProtocolError(f"the daemon sent {what}", code="reply-malformed", where=_WHERE)


# --- words ----------------------------------------------------------------------------------------


def _judged(session: Session, report: Mapping[str, Any]) -> int:
    """The exit code, and why on standard error."""
    if report["verified"]:
        return DONE
    sys.stderr.write(f"{_WHERE}: {report['message']} [{report['code']}]\n")
    if report["hint"]:
        sys.stderr.write(f"hint: {report['hint']}\n")
    return UNVERIFIED


def _one(item: Mapping[str, Any]) -> str:
    return render.fields(
        [
            ("checkpoint", item["name"]),
            ("digest", item["digest"]),
            ("continues", item["parent"] or "nothing: it is whole"),
            ("taken", render.moment(item["created"])),
            ("size", render.size(item["bytes"])),
            ("kept", _kept(item)),
        ]
    )


def _kept(item: Mapping[str, Any]) -> str:
    return "until it is deleted" if item["pinned"] else "until newer ones take its place"


def _table(items: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "FUNCTION": item["function"],
            "NAME": item["name"].partition("/")[2],
            "TAKEN": render.moment(item["created"]),
            "SIZE": render.size(item["bytes"]),
            "KEPT": "yes" if item["pinned"] else "automatic",
            "DIGEST": item["digest"][:16],
            "CONTINUES": item["parent"][:16] or "-",
        }
        for item in items
    ]
    return render.table(rows, "no checkpoints; accelctl checkpoint create FUNCTION takes one")


def _report(report: Mapping[str, Any]) -> str:
    lines = [
        f"{step['number']} {step['name']:<10} {step['result']:<20} {step['question']}".rstrip()
        for step in report["steps"]
    ]
    if report["verified"]:
        lines.append(f"verified: {report['digest']}, signed by {', '.join(report['signers'])}")
    return "\n".join(lines)


def _shown(reply: Mapping[str, Any]) -> str:
    report, frame, status = reply["report"], reply["frame"], reply["status"]
    text = [render.fields([("checkpoint", reply["name"])]), _report(report)]
    said = report["manifest"]
    if said is not None:
        text.append(_manifest(said, report["verified"]))
    if frame is not None:
        contexts = ", ".join(f"{p['name']} ({p['pid']})" for p in frame["processes"])
        text.append(
            render.fields(
                [
                    ("guest processes", contexts or "-"),
                    ("interrupt", "on" if frame["msi"] else "off"),
                    ("windows of RAM", str(frame["window_count"])),
                ]
            )
        )
    if status is not None:
        text.append(
            render.fields(
                [
                    ("objects", str(status["objects"])),
                    ("memory used", render.size(status["memory_used_bytes"])),
                    ("faults, resets", f"{status['faults']}, {status['resets']}"),
                ]
            )
        )
    return "\n\n".join(text)


def _manifest(said: Mapping[str, Any], verified: bool) -> str:
    sealed = said["seal"] is not None
    pairs = [
        ("function", said["function"]),
        ("profile", f"{said['profile']['name']}, {render.size(said['profile']['memory_bytes'])}"),
        ("vm", said["domain"] or "-"),
        ("host", said["source"]),
        ("for host", f"{said['audience'] or '-'}{' alone (encrypted)' if sealed else ''}"),
        ("number", f"{said['sequence']} of epoch {said['epoch']}"),
        ("continues", said["parent"] or "nothing: it is whole"),
        ("taken", render.moment(said["created_ns"] / 1e9)),
        ("expires", render.moment(said["expires_ns"] / 1e9)),
        ("chunks", f"{said['chunks']}, {render.size(said['payload_bytes'])}"),
        ("compression", said["algorithms"]["compression"]),
        ("computed with", f"accelvisor {said['firmware']['version']}, {said['firmware']['blas']}"),
        ("models", "\n".join(f"{m['model']} (key {m['key']})" for m in said["models"]) or "-"),
    ]
    head = "" if verified else "what it says of itself, which is not verified:\n"
    return head + render.fields(pairs)

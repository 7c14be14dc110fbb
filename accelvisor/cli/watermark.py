"""``accelctl watermark``: keys, marked layers in functions, and marks in files.

``embed`` and ``look`` need no daemon: they are for the owner's own machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelvisor.cli import render
from accelvisor.cli.commands import Session
from accelvisor.errors import UsageError
from accelvisor.limits import LIMITS

if TYPE_CHECKING:
    from accelvisor.frames.watermark import Key

DONE, FAILED, UNVERIFIED = 0, 1, 6
_WHERE = "accelctl"
#: One look takes tens of milliseconds for each model, and waits for others.
_LONG_S = 120.0


def key(session: Session) -> int:
    """``accelctl watermark key``, whichever."""
    return _KEY[session.options.deed](session)


def key_create(session: Session) -> int:
    """In a file of the caller's, or on this host."""
    path = session.options.file
    if path is None:
        reply = session.call("CreateWatermarkKey")
    else:
        from accelvisor.frames.watermark import Key

        made = Key.generate(os.urandom)
        _write_secret(path, made.to_text())
        reply = {"key": made.key_id}
    where = f"in {path}" if path else "on this host"
    session.show(reply, lambda: f"watermark key {reply['key']} is {where}")
    return DONE


def key_import(session: Session) -> int:
    reply = session.call("ImportWatermarkKey", secret=_read_secret(session.options.file))
    session.show(reply, lambda: f"watermark key {reply['key']} is on this host")
    return DONE


def key_export(session: Session) -> int:
    options = session.options
    reply = session.call("ExportWatermarkKey", key=options.key)
    if options.file == "-":
        sys.stdout.write(reply["secret"])
        return DONE
    _write_secret(options.file, reply["secret"])
    session.show({"key": options.key}, lambda: f"watermark key {options.key} is in {options.file}")
    return DONE


def key_list(session: Session) -> int:
    reply = session.call("ListWatermarkKeys")
    empty = "no watermark keys; accelctl watermark key create makes one"
    session.show(reply, lambda: "\n".join(reply["keys"]) or empty)
    return DONE


def key_remove(session: Session) -> int:
    name = session.options.key
    reply = session.call("RemoveWatermarkKey", key=name)
    session.show(reply, lambda: f"watermark key {name} is no more on this host")
    return DONE


def tensors(session: Session) -> int:
    reply = session.call("ListTensors", function=session.options.function)
    rows = [_tensor(item) for item in reply["tensors"]]
    session.show(reply, lambda: render.table(rows, "the function has no tensor of such a type"))
    return DONE


def register(session: Session) -> int:
    options = session.options
    reply = session.call(
        "RegisterModel",
        reply_s=_LONG_S,
        function=options.function,
        model=options.model,
        handle=options.handle,
        key=options.key,
    )
    session.show(reply, lambda: _verdicts([reply["verdict"]]))
    return DONE


def unregister(session: Session) -> int:
    options = session.options
    reply = session.call("UnregisterModel", function=options.function, model=options.model)
    session.show(reply, lambda: f"model {options.model} is looked for no more")
    return DONE


def list_all(session: Session) -> int:
    reply = session.call("ListModels", function=session.options.function)
    rows = [
        {
            "FUNCTION": item["function"],
            "MODEL": item["model"],
            "KEY": item["key"] + ("" if item["key_here"] else " (not here)"),
            **_tensor(item["tensor"]),
        }
        for item in reply["models"]
    ]
    empty = "no marked models; accelctl watermark register names one"
    session.show(reply, lambda: render.table(rows, empty))
    return DONE


def check(session: Session) -> int:
    """6 when a model is without its mark."""
    options = session.options
    reply = session.call(
        "CheckModels", reply_s=_LONG_S, function=options.function, nonce=options.nonce
    )
    session.show(reply, lambda: _verdicts(reply["verdicts"]))
    return DONE if all(item["accepted"] for item in reply["verdicts"]) else UNVERIFIED


def embed(session: Session) -> int:
    from accelvisor.kernels import modelfile, watermark  # numpy: only here

    options = session.options
    margin = watermark.MARGIN if options.margin is None else options.margin
    source, target = Path(options.source), Path(options.target)
    done = modelfile.mark(
        source, target, options.array, options.model, _key(options.key), margin
    )
    reply = {
        "array": done.array,
        "averages": done.averages,
        "largest_shift": float(done.largest_shift),
    }
    words = f"array {done.array} of {target} carries the mark of {options.model}"
    shift = f"no weight moved by more than {done.largest_shift:.2f} standard deviations"
    session.show(reply, lambda: f"{words}; {shift}")
    return DONE


def look(session: Session) -> int:
    """6 when the mark is not there."""
    from accelvisor.frames.watermark import BITS
    from accelvisor.kernels import modelfile

    options = session.options
    found = modelfile.look(Path(options.source), options.array, options.model, _key(options.key))
    reply = {"array": found.array, "errors": found.errors, "accepted": found.accepted}
    what = "carries" if found.accepted else "does not carry"
    words = f"array {found.array} {what} the mark of {options.model}"
    session.show(reply, lambda: f"{words}: {found.errors} of {BITS} bits wrong")
    return DONE if found.accepted else UNVERIFIED


_KEY: Mapping[str, Callable[[Session], int]] = {
    "create": key_create,
    "import": key_import,
    "export": key_export,
    "list": key_list,
    "remove": key_remove,
}


def _key(path: str) -> Key:
    from accelvisor.frames.watermark import Key

    return Key.from_text(_read_secret(path).encode())


def _read_secret(path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.read(LIMITS.watermark_key_bytes)
        with open(path, encoding="ascii") as stream:
            return stream.read(LIMITS.watermark_key_bytes)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"cannot read {path}: {reason}", where=_WHERE) from error


def _write_secret(path: str, text: str) -> None:
    """Readable by its owner alone; takes no other file's place."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", where=_WHERE) from error


def _tensor(item: Mapping[str, Any]) -> dict[str, str]:
    return {
        "HANDLE": item["handle"],
        "TYPE": item["dtype"],
        "SHAPE": " x ".join(map(str, item["shape"])) or "-",
        "ADDRESS": f"{item['address']:#x}",
    }


def _verdicts(items: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        {
            "MODEL": item["model"],
            "KEY": item["key"],
            "WRONG": "-" if item["errors"] is None else str(item["errors"]),
            "MAY BE": str(item["threshold"]),
            "MARK": "there" if item["accepted"] else "missing",
        }
        for item in items
    ]
    return render.table(rows, "the function has no marked model whose key is on this host")

"""What a host keeps for watermarks, below ``STATE/watermarks``, readable by the daemon alone.

============ =================================================================================
KEYID.key    an owner's secret (0600); written whole or not at all
models.db    which tensor of which function is a marked layer of which model (SQLite)
============ =================================================================================

A registration may name a key that is not here: the model came with a function, and its owner did
not give this host the key. It is kept so that the next host is told of it.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from pathlib import Path

from accelvisor.daemon import atomic
from accelvisor.daemon.database import Database, statements
from accelvisor.errors import (
    CapacityError,
    ConflictError,
    DataError,
    NotFoundError,
    StateError,
    SystemFailure,
)
from accelvisor.frames.watermark import (
    Key,
    Registration,
    decode_registration,
    encode_registration,
)
from accelvisor.limits import LIMITS

_SCHEMA = """
CREATE TABLE models (
    function TEXT NOT NULL,       -- UUID
    model TEXT NOT NULL,
    key TEXT NOT NULL,
    registration BLOB NOT NULL,   -- canonical msgpack
    PRIMARY KEY (function, model)
) STRICT;
"""
_KEY_ID = re.compile(r"[0-9a-f]{32}")


class Marks:
    """Keys and registrations. Thread-safe; what returned is on disk.

    Args:
        directory: made when it is missing.

    Raises:
        StateError: ``watermark-damaged``: a file is not what was written.
        SystemFailure: ``watermark-io``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._failed(error) from error
        self._db = Database(
            directory / "models.db", (statements(_SCHEMA),), failed=self._failed,
            newer=lambda version: self._damaged(f"its table is of version {version}"),
            damaged=self._damaged,
        )  # fmt: skip

    def close(self) -> None:
        self._db.close()

    # --- keys -------------------------------------------------------------------------------------

    def keys(self) -> list[str]:
        """The ids of the keys that are here, sorted."""
        try:
            names = [path.stem for path in self._directory.glob("*.key")]
        except OSError as error:
            raise self._failed(error) from error
        return sorted(name for name in names if _KEY_ID.fullmatch(name))

    def key(self, key_id: str) -> Key | None:
        """The key with this id; None when its owner did not give it to this host.

        Raises:
            StateError: ``watermark-damaged``: its file holds another one, or none.
        """
        if not _KEY_ID.fullmatch(key_id):
            return None
        try:
            with open(self._directory / f"{key_id}.key", "rb") as file:
                found = Key.from_text(file.read(LIMITS.watermark_key_bytes))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failed(error) from error
        except DataError as error:
            raise self._damaged(f"{key_id}.key: {error.message}") from error
        if found.key_id != key_id:
            raise self._damaged(f"{key_id}.key holds another key")
        return found

    def add_key(self, key: Key) -> str:
        """Keep a key; one that is here already stays. Returns its id.

        Raises:
            CapacityError: ``watermark-keys``.
        """
        with self._lock:
            names = self.keys()
            if key.key_id in names:
                return key.key_id
            if len(names) >= LIMITS.watermark_keys:
                raise CapacityError(
                    f"{len(names)} watermark keys are kept here",
                    code="watermark-keys",
                    where="watermark",
                    hint="accelctl watermark key remove",
                )
            try:
                path = self._directory / f"{key.key_id}.key"
                atomic.replace(path, key.to_text().encode())
            except OSError as error:
                raise self._failed(error) from error
        return key.key_id

    def remove_key(self, key_id: str) -> None:
        """Forget a key.

        Raises:
            NotFoundError: ``watermark-key-unknown``.
            ConflictError: ``watermark-key-used``: a function's model is checked with it.
        """
        require_key(self.key(key_id), key_id)
        wanted = "SELECT function, model FROM models WHERE key = ? LIMIT 1"
        used = self._db.execute(wanted, (key_id,))
        for function, model in used:
            raise ConflictError(
                f"model {model} of function {function} is checked with it",
                code="watermark-key-used",
                where="watermark",
                hint="accelctl watermark unregister",
            )
        try:
            (self._directory / f"{key_id}.key").unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(error) from error

    # --- registrations ----------------------------------------------------------------------------

    def models(self, function: str | None = None) -> list[Registration]:
        """All registrations, or those of one function, in the order of functions and names.

        Raises:
            StateError: ``watermark-damaged``.
        """
        rows = self._db.execute(
            "SELECT registration FROM models WHERE ? IS NULL OR function = ?"
            " ORDER BY function, model",
            (function, function),
        )
        try:
            return [decode_registration(data) for (data,) in rows]
        except DataError as error:
            raise self._damaged(error.message) from error

    def put(self, *registrations: Registration) -> None:
        """Keep registrations, all or none; those of the same function and name are replaced.

        Raises:
            CapacityError: ``watermark-models``: a manifest could not name them all.
        """
        with self._db.transaction() as connection:
            for item in registrations:
                connection.execute(
                    "INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?)",
                    (item.function, item.model, item.key, encode_registration(item)),
                )
            for function in {item.function for item in registrations}:
                _require_bounded(connection, function)

    def drop(self, function: str, model: str | None = None) -> int:
        """Forget a registration, or all of a function. Returns how many there were."""
        rows = self._db.execute(
            "DELETE FROM models WHERE function = ? AND (? IS NULL OR model = ?) RETURNING 1",
            (function, model, model),
        )
        return len(rows)

    # --- inside -----------------------------------------------------------------------------------

    def _damaged(self, why: object) -> StateError:
        return StateError(
            f"the records of watermarks are damaged: {why}",
            code="watermark-damaged",
            where=str(self._directory),
            hint="import the key again; models.db may be deleted, then models are registered anew",
        )

    def _failed(self, error: Exception) -> SystemFailure:
        return SystemFailure(
            f"the records of watermarks cannot be used: {error}",
            code="watermark-io",
            where=str(self._directory),
        )


def _require_bounded(connection: sqlite3.Connection, function: str) -> None:
    (count,) = connection.execute(
        "SELECT count(*) FROM models WHERE function = ?", (function,)
    ).fetchone()
    if count > LIMITS.manifest_models:
        raise CapacityError(
            f"a function has at most {LIMITS.manifest_models} watermarked models",
            code="watermark-models",
            where="watermark",
        )


def require_key(key: Key | None, key_id: str) -> Key:
    """Raises NotFoundError ``watermark-key-unknown``."""
    if key is None:
        raise NotFoundError(
            f"watermark key {key_id} is not on this host",
            code="watermark-key-unknown",
            where="watermark",
            hint="its owner has it: accelctl watermark key import",
        )
    return key

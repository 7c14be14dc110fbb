"""What a person is told of a file, whatever is in it."""

from __future__ import annotations

import io

import pytest

from accelvisor.frames import manifest as manifests
from accelvisor.frames.chunks import Coding, Header, Kind
from accelvisor.frames.container import Writer
from accelvisor.frames.envelope import sign
from accelvisor.frames.keyring import Keyring
from accelvisor.frames.manifest import MANIFEST_TYPE
from accelvisor.frames.report import report
from accelvisor.limits import LIMITS

from .building import KEY_A, NOW, document, manifest

TIB = 1 << 40


def signed_file(section: str, nbytes: int) -> io.BytesIO:
    """A file whose one chunk is the last page of a section of that size, signed by a trusted host
    that does not check what it signs.
    """
    file = io.BytesIO()
    writer = Writer(file)
    kind = Kind[section.upper()]
    writer.add(Header(0, kind, Coding.ZEROS, nbytes - 4096, 4096), b"")
    said = manifest(
        sections={"function": 10, "status": 10, section: nbytes},
        chunks=1, payload_bytes=0, root=writer.root,
    )  # fmt: skip
    writer.finish(sign(MANIFEST_TYPE, manifests._encode(said), (KEY_A,)).encode())
    file.seek(0)
    return file


@pytest.mark.parametrize("section", ["function", "status", "memory", "window"])
@pytest.mark.parametrize("nbytes", [TIB, LIMITS.document_bytes + 4096])
def test_a_small_file_of_an_endless_section_is_refused(section: str, nbytes: int) -> None:
    """Whoever looked at it got a MemoryError: room was made for all of it."""
    found = report(signed_file(section, nbytes), Keyring(document()), lambda: NOW)
    assert not found.verified
    assert found.code == "frame-shape"


def test_a_document_as_long_as_any_may_be_is_shown() -> None:
    found = report(
        signed_file("function", LIMITS.document_bytes), Keyring(document()), lambda: NOW
    )
    assert found.verified
    assert len(found.documents[Kind.FUNCTION]) == LIMITS.document_bytes

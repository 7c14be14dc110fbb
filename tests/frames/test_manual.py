"""accelvisor-checkpoint(5) says what the code does: kinds, codings, steps, codes, fields, sizes."""

from __future__ import annotations

import re
from pathlib import Path

from accelvisor.frames import container
from accelvisor.frames.chunks import HEADER, RECORD, TAG_BYTES, Coding, Kind
from accelvisor.frames.manifest import MANIFEST_TYPE, OFFER_TYPE, Manifest, Offer, Profile
from accelvisor.frames.steps import STEP_OF, STEPS
from accelvisor.limits import KIB, LIMITS, MIB

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/man/accelvisor-checkpoint.5").read_text().replace("\\-", "-")


def table(first: str) -> list[list[str]]:
    """The rows of the table whose head begins with ``first``."""
    for body in re.findall(r"^\.TS\n[^\n]*\n[^\n]*\n(.*?)^\.TE$", PAGE, re.MULTILINE | re.DOTALL):
        rows = [line.split("|") for line in body.splitlines()]
        if rows[0][0] == first:
            return rows[1:]
    raise AssertionError(first)


def test_kinds_and_codings() -> None:
    assert [(int(n), name) for n, name, _ in table("kind")] == [
        (kind, kind.name.lower()) for kind in Kind
    ]
    assert [(int(n), name) for n, name, _ in table("coding")] == [
        (coding, coding.name.lower()) for coding in Coding
    ]


def test_steps_and_their_codes_in_order() -> None:
    rows = [
        (int(n), name, tuple(codes.split(", ")))
        for n, name, codes in re.findall(r"^\.B (\d) (\w+)\n(.*)\.$", PAGE, re.MULTILINE)
    ]
    assert rows == [(step.number, step.name, step.codes) for step in STEPS]


def test_every_code_of_a_step_is_explained_with_its_step() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    found = dict(re.findall(r"^\| `(frame-[a-z-]+)` \| step (\d):", text, re.MULTILINE))
    assert {code: int(step) for code, step in found.items()} == {
        code: step.number for code, step in STEP_OF.items()
    }


def test_fields_of_the_manifest_in_the_order_of_the_code() -> None:
    body = PAGE[PAGE.index(".SS Manifest") : PAGE.index(".SS Verification")]
    lines = re.findall(r"^\.TP\n\.BR? (.*)$", body, re.MULTILINE)
    fields = [name for line in lines for name in re.findall(r"\w+", line)]
    assert fields == list(Manifest.__struct_fields__)
    assert fields[:-4] == list(Offer.__struct_fields__)
    [profile] = re.findall(r"^\{(cores[^}]*)\}", body, re.MULTILINE)
    assert profile.split(", ") == sorted(Profile.__struct_fields__)


def test_sizes_and_types() -> None:
    most = (LIMITS.manifest_bytes + container.AREA_BYTES) // KIB
    for said in (
        f"{container.HEAD.size} bytes: magic \\(dqXCKP\\(dq, version u16 ({container.VERSION})",
        f"(at most {most} KiB)",
        f"a record of {RECORD.size} bytes",
        f"the first {HEADER.size} bytes of the record",
        f"1 byte to {LIMITS.chunk_bytes // MIB} MiB",
        f"ciphertext, {TAG_BYTES} bytes longer",
        f"1 to {LIMITS.signatures} of them",
        f"manifest is {MANIFEST_TYPE}",
        OFFER_TYPE,
    ):
        assert said in PAGE, said

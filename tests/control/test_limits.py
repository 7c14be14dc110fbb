"""docs/limits.md is what the source says, and each limit says why."""

from __future__ import annotations

from .limits_document import DOCUMENT, fields, render, rows


def test_the_document_is_current() -> None:
    hint = "python -m tests.control.limits_document writes it"
    assert DOCUMENT.read_text() == render(), hint


def test_every_limit_is_in_it_once_with_a_section_and_a_reason() -> None:
    found = list(rows())
    assert [field for _, field, _ in found] == fields()
    assert all(section and reason for section, _, reason in found)

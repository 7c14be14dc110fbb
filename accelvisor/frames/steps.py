"""The order in which a checkpoint is verified, and what each step may answer.

A table, so that the verifier, its audit records, the manual page and the tests cannot disagree. A
checkpoint with several faults is refused for the one of the lowest step. Only after step 7 may
anything be decrypted, expanded, parsed or brought near a device.
"""

from __future__ import annotations

from typing import NamedTuple

from accelvisor.errors import FrameRefused


class Step(NamedTuple):
    """One step: its number, its name in records, what it asks, and the codes it refuses with."""

    number: int
    name: str
    question: str
    codes: tuple[str, ...]


STEPS: tuple[Step, ...] = (
    Step(1, "shape", "is it a checkpoint, of a version that is spoken here",
         ("frame-shape", "frame-version")),
    Step(2, "key", "is each key that signed it known, current and not revoked",
         ("frame-key-unknown", "frame-key-revoked", "frame-key-expired")),
    Step(3, "signature", "is each signature right, and are there enough",
         ("frame-signature", "frame-threshold")),
    Step(4, "address", "is it from that host, for this one, and not seen before",
         ("frame-source", "frame-audience", "frame-nonce", "frame-replayed")),
    Step(5, "freshness", "is it of now, and of the epoch that is due",
         ("frame-stale", "frame-future", "frame-epoch-old", "frame-epoch-jump")),
    Step(6, "chunks", "is every chunk there, in its place, unchanged, and in time",
         ("frame-parent", "frame-chunk", "frame-truncated", "frame-excess", "frame-slow",
          "frame-offer", "frame-root")),
    Step(7, "binding", "is it this owner's, this function's and this domain's, and does it fit",
         ("frame-owner", "frame-function", "frame-domain", "frame-profile")),
)  # fmt: skip

#: Which step a code belongs to.
STEP_OF = {code: step for step in STEPS for code in step.codes}

_HINTS = {
    1: "it was damaged, or made by another version of accelvisor",
    2: "see accelctl trust show: the host may have to be added, or its key was rotated or revoked",
    3: "it was changed after it was signed; do not use it",
    4: "it was made for another host, or was used before",
    5: "make a new checkpoint; when it is new, compare the clocks of the two hosts",
    6: "it was damaged or cut on its way; do not use it",
    7: "it belongs to another owner, function or domain, or needs a function of another size",
}


def refuse(code: str, message: str) -> FrameRefused:
    """The refusal with this code; its step and hint follow from the table."""
    step = STEP_OF[code]
    return FrameRefused(
        message, step=step.number, code=code, where=f"frames:{step.name}", hint=_HINTS[step.number]
    )

"""What a function's saved state is checked by once it was loaded: a digest for each section.

Registers and window are small: SHA-256. Device memory is large, and it is read back while the guest
stands still: each page's 64-bit words are summed (any change within one word changes the sum), and
the sums, in order, are hashed. The sums detect a load that went wrong; that nobody changed the
bytes on their way is what the signature says (adr/0008).
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from accelvisor.limits import MIB
from accelvisor.vfio_user.protocol import PAGE_BYTES

_WORDS = PAGE_BYTES // 8
#: What one thread sums in one go, without the interpreter's lock.
_PART_BYTES = 8 * MIB

Sums = npt.NDArray[np.uint64]


def page_sums(memory: memoryview, sums: Sums, first: int, count: int) -> None:
    """Sum pages ``first`` to ``first + count`` of ``memory`` into ``sums`` (one uint64 a page)."""
    words = np.frombuffer(memory, np.uint64, count * _WORDS, first * PAGE_BYTES)
    np.add.reduce(words.reshape(count, _WORDS), axis=1, out=sums[first : first + count])


def all_sums(memory: memoryview, ranges: list[tuple[int, int]], threads: int = 2) -> Sums:
    """The sums of all pages of ``memory``; those outside of ``ranges`` (from, to; bytes) are holes,
    which are zero and are not read, since reading a hole allocates it.
    """
    sums = np.zeros(len(memory) // PAGE_BYTES, np.uint64)
    parts = [
        (at // PAGE_BYTES, min(_PART_BYTES, end - at) // PAGE_BYTES)
        for start, end in ranges
        for at in range(start, end, _PART_BYTES)
    ]
    if len(parts) < 2 or threads < 2:
        for first, count in parts:
            page_sums(memory, sums, first, count)
        return sums
    with ThreadPoolExecutor(threads, thread_name_prefix="sums") as pool:
        for done in [pool.submit(page_sums, memory, sums, *part) for part in parts]:
            done.result()
    return sums


def memory_digest(sums: Sums) -> str:
    """The memory section's digest."""
    return hashlib.sha256(sums.astype("<u8").tobytes()).hexdigest()


def section_digest(section: bytes | memoryview) -> str:
    """Any other section's digest."""
    return hashlib.sha256(section).hexdigest()

"""Every limit of accelvisor in one frozen dataclass, each line with its reason.

A limit that a user may want to change is a configuration key; what stands here is what no
configuration may exceed, so that outside data (guest, peer, file, client) has a bound everywhere.
This module is shared with the guest, so it imports only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, counts, depths and seconds. Units are in the names: ``_bytes``, ``_s`` (seconds)."""

    # --- vfio-user -----------------------------------------------------------------------------
    # QEMU negotiates 1 MiB data transfers; a message is that plus its headers.
    vfio_message_bytes: int = MIB + 4 * KIB
    vfio_transfer_bytes: int = MIB
    # QEMU hangs on DMA_READ of 256 KiB (measured); 64 KiB is safe and costs one more round trip.
    vfio_dma_chunk_bytes: int = 64 * KIB
    # QEMU advertises 16; the kernel's SCM_MAX_FD is 253.
    vfio_message_fds: int = 16
    # Behind an emulated IOMMU every 4 KiB page is a map: 1 GiB of pinned guest RAM.
    dma_maps: int = 262_144
    # QEMU closes the connection after 5 s of silence; give up well before it does.
    vfio_reply_s: float = 4.0

    # --- function ------------------------------------------------------------------------------
    queues: int = 64
    # A power of two; 256 entries keep both rings of a queue within 24 KiB of window.
    ring_entries: int = 256
    contexts: int = 64
    # Tensors and programs of one function together; the object table is 128 B a record.
    objects: int = 8192
    tensor_rank: int = 8
    tensor_bytes: int = 16 * GIB
    # A program is validated in one go in the front end: this bounds that pause to milliseconds.
    program_bytes: int = MIB
    program_instructions: int = 4096
    program_slots: int = 1024
    # Segments of one scatter list: 4096 pages of 4 KiB are 16 MiB a command without contiguity.
    scatter_segments: int = 65_536
    query_bytes: int = 256 * KIB
    # A freeze may have to wait for one tile; migration's blackout budget allows 20 ms of it.
    tile_s: float = 0.020
    # In a row without a good command between: then the context is stopped for good.
    window_bytes: int = GIB
    memory_bytes: int = 64 * GIB
    # Worker restarts within a minute before the holder gives up and answers all-ones.
    worker_restarts_per_minute: int = 30
    # Workers that one message or command may cost before it is refused instead of tried again.
    worker_deaths: int = 3

    # --- admin and control sockets ---------------------------------------------------------------
    admin_message_bytes: int = MIB
    admin_depth: int = 32
    admin_clients: int = 64
    # Of one user that may not do everything: others get in even if that one holds all it can.
    admin_clients_per_uid: int = 16
    # A client that does not read gets at most this much buffered, then it is dropped.
    admin_backlog_bytes: int = 256 * KIB
    # Seconds that a client may leave a full backlog unread before it is dropped.
    admin_drain_s: float = 10.0
    control_reply_s: float = 5.0
    function_ready_s: float = 10.0

    # --- daemon ----------------------------------------------------------------------------------
    config_bytes: int = MIB
    functions: int = 256
    cards: int = 64
    name_chars: int = 64

    # --- hook ------------------------------------------------------------------------------------
    # libvirt waits for the hook with its domain lock held.
    hook_s: float = 2.0
    hook_xml_bytes: int = 4 * MIB


LIMITS = Limits()

"""Every limit of accelvisor in one frozen dataclass, each with its reason in the comment above it
(docs/limits.md is written from them).

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
    # A message is one transfer plus its headers.
    vfio_message_bytes: int = MIB + 4 * KIB
    # What QEMU negotiates for one access to data.
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
    # BAR0 has a fixed block of registers for each queue; more than a guest has CPUs gain nothing.
    queues: int = 64
    # A power of two; 256 entries keep both rings of a queue within 24 KiB of window.
    ring_entries: int = 256
    # One for each user of a function at a time; a context is a row of a fixed table.
    contexts: int = 64
    # Tensors and programs of one function together; the object table is 128 B a record.
    objects: int = 8192
    # What the record of a tensor in the object table has room for.
    tensor_rank: int = 8
    # Sizes multiply without overflow in 64 bits, and one fits the largest card's share.
    tensor_bytes: int = 16 * GIB
    # A program is validated in one go in the front end: this bounds that pause to milliseconds.
    program_bytes: int = MIB
    # Bounds validation as well; longer work is several programs.
    program_instructions: int = 4096
    # Operands of one program; each is a row of the table that a submission binds.
    program_slots: int = 1024
    # Chips of one function: each has two queues, and their progress a record of the state.
    chips: int = 16
    # Links of one function: each of its chips has four ports, and one way may have some hops.
    function_links: int = 256
    # Steps of a search for a ring of free links on a card: some tens of milliseconds.
    ring_steps: int = 20_000
    # Steps of a search for a cycle over given chips, which is asked for seldom: tenths of a second.
    cycle_steps: int = 100_000
    # Entries of all queues of one graph: it is checked in one go, as a program is.
    graph_entries: int = 16_384
    # Arguments of all nodes of one graph together.
    graph_bindings: int = 65_536
    # One for each queue is enough; a counter for each dependency is what people write by hand.
    graph_events: int = 16_384
    # A graph of these, with its bindings.
    graph_bytes: int = 2 * MIB
    # Synchronising commands of one queue that others wait for at a time.
    waiting_queues: int = 16
    # Commands that wait for one of them.
    waiting_commands: int = 64
    # The last synchronising commands of a queue that are remembered as complete.
    completed_ids: int = 256
    # Commands of one function that are not ordered, from the ring to their completion; a queue's
    # share is this by the number of queues.
    commands: int = 1024
    # Segments of one scatter list: 4096 pages of 4 KiB are 16 MiB a command without contiguity.
    scatter_segments: int = 65_536
    # The longest answer, the description of all instructions, with room to grow.
    query_bytes: int = 256 * KIB
    # A freeze may have to wait for one tile; migration's blackout budget allows 20 ms of it.
    tile_s: float = 0.020
    # A PCI BAR of more address space than this fits behind few root ports.
    window_bytes: int = GIB
    # Private memory of one function: a memfd, taken from the host as it is used.
    memory_bytes: int = 64 * GIB
    # One file of a VM's memory (a NUMA cell's, or all of it): what the device writes into it is
    # remembered page by page while the VM moves.
    guest_file_bytes: int = 256 * GIB
    # Of one card's host port, a second: 16 lanes of PCIe 7.0 carry a quarter of it.
    port_rate_bytes: int = 1024 * GIB
    # What a VM's devices bring beside its RAM (video memory, memory shared with others), and the
    # list of the pages that a function wrote.
    guest_device_bytes: int = GIB
    # Pieces of card memory that one function's segment table has entries for.
    segments: int = 16
    # Of one function, over all of its chips.
    cores: int = 256
    # Faults without a program between them that ran to its end: then the function is reset.
    fault_row: int = 16
    # Such resets within a minute before the function is quarantined: its programs do not get well.
    fault_resets_per_minute: int = 3
    # Worker restarts within a minute before the holder gives up and answers all-ones.
    worker_restarts_per_minute: int = 30
    # Workers that may crash over one message or command, without bringing it further, before it is
    # refused instead of tried again.
    worker_deaths: int = 3
    # Workers that may be killed from outside meanwhile: that is hardly the message's fault.
    worker_kills: int = 20

    # --- admin and control sockets ---------------------------------------------------------------
    # The largest message is a domain's XML, some tens of KiB.
    admin_message_bytes: int = MIB
    # Nesting of JSON; the interface's types need 5.
    admin_depth: int = 32
    # Connections at a time; each may hold a message and a backlog.
    admin_clients: int = 64
    # Of one user that may not do everything: others get in even if that one holds all it can.
    admin_clients_per_uid: int = 16
    # Of all users together that may do nothing: they can ask for the interface, and go.
    admin_clients_without_level: int = 8
    # What one of those may send: a call without parameters of size.
    admin_message_without_level_bytes: int = 4 * KIB
    # A client that does not read gets at most this much buffered, then it is dropped.
    admin_backlog_bytes: int = 256 * KIB
    # Seconds that a client may leave a full backlog unread before it is dropped.
    admin_drain_s: float = 10.0
    # A function answers in milliseconds unless its host is out of CPU time.
    control_reply_s: float = 5.0
    # Starting takes half a second; a loaded host may take ten times as long, twice over.
    function_ready_s: float = 10.0
    # How often what functions take of a limited host port is balanced, while a card has one: a
    # guest that begins to copy waits two of these for its share, and looking costs microseconds.
    port_poll_s: float = 0.1
    # How often a holder is asked whether it gave up: 256 functions cost a percent of a CPU.
    function_poll_s: float = 5.0

    # --- daemon ----------------------------------------------------------------------------------
    # A configuration of 64 cards and hundreds of profiles is some tens of KiB.
    config_bytes: int = MIB
    # Of one host; each is three processes.
    functions: int = 256
    # VMs that wait for a static function: each holds a connection of the admin socket, and half of
    # those stay for whoever gives one back.
    function_waiters: int = 32
    # A day: whoever waits longer asks again.
    function_wait_s: float = 86_400.0
    # One host's domains that it asked a place for, and may bring: it has no more VMs on their way.
    function_askers: int = 256
    # Of one host; they are only numbers, but every placement looks at each.
    cards: int = 64
    # Names appear in tables, file names and domain XML.
    name_chars: int = 64
    # Reading one of libvirt's objects takes milliseconds; past this it hangs.
    libvirt_call_s: float = 30.0
    # Verbs that wait for a guest have deadlines of up to 600 s of their own.
    libvirt_patient_s: float = 660.0
    # Threads for what blocks: a function that moves keeps one or two for the length of a round.
    daemon_threads: int = 128

    # --- migration and ledger --------------------------------------------------------------------
    # A control message carries at most an envelope for each function of a VM.
    migration_message_bytes: int = 2 * MIB
    # A manifest with its signatures, about 100 bytes each.
    migration_envelope_bytes: int = 72 * KIB
    # Functions of one VM that move together: more do not fit behind QEMU's root ports.
    migration_functions: int = 16
    # Moves of one other host that have not ended: it cannot have more VMs of ours on their way.
    migration_open: int = 64
    # Reasons and hints, shown in virsh's one-line errors.
    migration_text_chars: int = 1024
    # Pre-copy rounds: a working set that did not shrink in eight will not in the ninth.
    migration_rounds: int = 8
    # The hook waits for an offer while libvirt holds the domain's lock.
    migration_reserve_s: float = 5.0
    # A reservation without any progress.
    migration_progress_s: float = 60.0
    # How long a pre-copy waits for a broken link.
    migration_link_s: float = 30.0
    # QEMU's D-Bus calls end after 25 s, and an ended call cannot be answered.
    migration_quiesce_s: float = 15.0
    # Load has the same 25 s; what QEMU sends between Save and Load takes some of it.
    migration_load_s: float = 20.0
    # Between two questions to an arbiter that did not answer.
    migration_retry_s: float = 1.0
    # Until libvirt has started a QEMU for a reservation; one with huge pages takes its time.
    migration_start_s: float = 60.0
    # How long the source keeps what was committed away while the destination is silent.
    migration_scrub_s: float = 300.0
    # One request to one etcd endpoint; a healthy one answers in milliseconds.
    etcd_request_s: float = 2.0
    # All endpoints together: an answer must leave time for the other side of a switch-over.
    etcd_total_s: float = 6.0
    # What libvirt's hook waits for the ledger, of its own two seconds (hook_s).
    ledger_admit_s: float = 0.5
    # An answer of etcd: one range of records of one function.
    etcd_answer_bytes: int = 4 * MIB

    # --- hook ------------------------------------------------------------------------------------
    # libvirt waits for the hook with its domain lock held.
    hook_s: float = 2.0
    # A place for each function is made, which may take a process; nothing runs yet that would wait.
    hook_arriving_s: float = 10.0
    # The context is written in a second; the state's first pass may be waited for.
    hook_started_s: float = 20.0
    # Of use as a hint only: the domain is gone, and libvirt waits.
    hook_gone_s: float = 1.0
    # A domain's XML is some tens of KiB; libvirt itself refuses more than 4 MiB.
    hook_xml_bytes: int = 4 * MIB

    # --- QEMU's bus and private monitor --------------------------------------------------------
    # What QEMU takes from one helper, and so what it can bring (backends/dbus-vmstate.c).
    vmstate_bytes: int = MIB
    # That and the message's header.
    dbus_message_bytes: int = MIB + 8 * KIB
    # QEMU stands still while it waits, and gives up after 25 s (GLib's default): we are first.
    vmstate_s: float = 20.0
    # A command that needs no guest takes milliseconds; QEMU's main loop may be busy with a device.
    monitor_command_s: float = 5.0

    # --- frames ----------------------------------------------------------------------------------
    # Two PEM blocks of 119 bytes each.
    identity_bytes: int = 4 * KIB
    # What is hashed and kept in memory at once; larger chunks hash no faster.
    chunk_bytes: int = MIB
    # 64 GiB of memory in chunks of 64 KiB, sixteen times over in rounds of pre-copy.
    chunks: int = 1 << 24
    # The payloads of one checkpoint: the largest memory, sixteen times over in rounds of pre-copy.
    checkpoint_bytes: int = 1024 * GIB
    # A manifest is about 1 KiB; the rest is room for the watermarks of its models.
    manifest_bytes: int = 64 * KIB
    # Watermarked models of one function; each is about 150 bytes of manifest.
    manifest_models: int = 256
    # Numbers that a mark's secret matrix has for each bit: 128 rows of them are 128 MiB.
    watermark_averages: int = 1 << 17
    # Copied out of a function to look for a mark; a dense layer of 8192 x 8192 float32.
    watermark_tensor_bytes: int = 256 * MIB
    # A model's file, and what it unpacks to: it is read whole.
    watermark_file_bytes: int = GIB
    # Keys of watermarks that a host keeps: one for each of its customers.
    watermark_keys: int = 4096
    # A key's file: a line that says what it is, and 64 digits.
    watermark_key_bytes: int = KIB
    # A verdict on one model is about 400 bytes.
    watermark_verdict_bytes: int = 4 * KIB
    # Who signs a manifest: its host, and as many witnesses as a threshold may ask for.
    signatures: int = 16
    # A function frame with the largest number of DMA maps.
    document_bytes: int = 32 * MIB
    # Values in one document, all levels together: 8 for each DMA map.
    document_values: int = 1 << 22
    # Nesting of a document; the deepest, a context's programs, needs 6.
    document_depth: int = 16
    # As many hosts as below with all their keys, and the keys that were revoked.
    trust_bytes: int = 2 * MIB
    # A fleet that migrates among itself; libvirt's tools know no larger ones.
    trust_hosts: int = 1024
    # Of one host at a time: the current one, and those that retire.
    host_keys: int = 8
    # Of one host, its keys that once counted: a ledger's record that was signed so many rotations
    # ago can still be read.
    history_keys: int = 64
    # Hosts whose old keys are known: those that are trusted, and three times as many that were.
    history_hosts: int = 4096
    # Never forgotten: four for each host.
    revoked_keys: int = 4096
    # Versions that a trust document may be ahead: a host that was away for years still catches up,
    # and nobody can use up the numbers.
    trust_jump: int = 1000
    # A rotated key may count this much longer: a host that was away for a month still knows it.
    rotation_overlap_s: float = 30 * 86_400.0
    # Of one host, rotations that are remembered until the roots have signed them: one a month for
    # five years. Each costs two signatures to verify.
    rotations: int = 64
    # How far the clocks of two hosts may be apart: NTP keeps them within milliseconds.
    clock_skew_s: float = 2.0
    # A migration's manifest is signed when its last chunk leaves, and verified at once.
    frame_age_s: float = 120.0
    # One sentence for people.
    audit_text_chars: int = 512
    # A record is a few hundred bytes; its three texts may be of 4-byte characters.
    audit_record_bytes: int = 8 * KIB
    # Epochs that a function may be ahead of what is known: so that no host uses up all 2**63. An
    # abort spends one, and a host with a ledger of its own hears of those elsewhere when the
    # function comes back: this is ten a second for thirteen years.
    epoch_jump: int = 2**32
    # Checkpoints at rest that continue one another: restoring the last reads them all.
    checkpoint_chain: int = 16
    # Left free where checkpoints lie: the daemon's own records are on the same file system.
    checkpoint_free_bytes: int = 64 * MIB
    # A checkpoint at rest counts so long, ten years; what keeps out an old one is its epoch.
    checkpoint_life_s: float = 10 * 366 * 86_400.0
    # Of a checkpoint that goes to or from accelctl, in one message of the admin interface: base64
    # makes it a third larger, and a message has 1 MiB.
    checkpoint_part_bytes: int = 512 * KIB
    # Checkpoints that are being brought at a time; each is a file that takes room.
    checkpoint_uploads: int = 4
    # One of which nothing more came for so long is forgotten.
    checkpoint_upload_idle_s: float = 60.0

    # --- peers -----------------------------------------------------------------------------------
    # The largest message is a trust document.
    peer_frame_bytes: int = 2 * MIB + 64 * KIB
    # A greeting is some hundred bytes; nobody may send more before we know its version.
    peer_hello_bytes: int = 4 * KIB
    # What may be under way on one stream before its receiver took some of it: two of the largest.
    peer_window_bytes: int = 5 * MIB
    # A function's states and events share few streams; each costs a counter.
    peer_channels: int = 16
    # TLS and greeting take two round trips; who is slower than this holds a connection for nothing.
    peer_handshake_s: float = 5.0
    # Of one host, all peers together; each may hold a frame.
    peer_connections: int = 64
    # Of one address before it has shown who it is.
    peer_strangers: int = 16
    # New connections of one address a second: a handshake costs a millisecond of CPU.
    peer_connects_per_s: float = 20.0
    # Requests of one peer a second; a migration makes some tens in all.
    peer_requests_per_s: float = 200.0
    # Requests of one peer that wait for an answer.
    peer_requests: int = 64
    # Silence after which a peer is asked whether it is there.
    peer_ping_s: float = 3.0
    # Silence after which it is not: three questions went unanswered.
    peer_dead_s: float = 10.0
    # Bulk connections of one transfer; more than there are cores gain nothing.
    bulk_streams: int = 8
    # Bulk connections that have not shown a ticket, of all addresses together; each keeps a thread.
    # A move opens its own one after the other.
    bulk_strangers: int = 16
    # A transfer that gets nowhere for so long is given up; it can be resumed.
    bulk_stall_s: float = 10.0
    # And so is one that is slower than this on average over that time.
    bulk_floor_bytes: int = 64 * KIB
    # Ranges of chunks a receiver tells after a broken connection; what is not told comes again.
    bulk_ranges: int = 4096
    # Rounds of pre-copy of one transfer; 8 are usual.
    bulk_rounds: int = 4096
    # Chunks of one round, of some hundred bytes each at the receiver: 64 GiB in pieces of 256 KiB,
    # each cut into four by zero pages.
    bulk_chunks: int = 1 << 20
    # Between the answer that brings a ticket and the connection that shows it lies one round trip.
    ticket_s: float = 30.0
    # Tickets that wait; a transfer has one for each connection.
    tickets: int = 256
    # A join code is read from one screen and typed on another.
    join_code_s: float = 900.0
    # Wrong answers to one join code; it has 128 bits, so this only keeps the log short.
    join_attempts: int = 5


LIMITS = Limits()

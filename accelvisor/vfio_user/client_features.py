"""Device features and migration as calls of the client (mixed into :class:`client.Client`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from accelvisor.vfio_user import features
from accelvisor.vfio_user.messages import bad, need
from accelvisor.vfio_user.model import Refusal
from accelvisor.vfio_user.protocol import Command, Feature, FeatureFlag, MigState

if TYPE_CHECKING:
    from accelvisor.vfio_user.negotiate import Agreement


class FeatureCalls:
    """Needs ``call`` and ``agreement`` of the class it is mixed into."""

    if TYPE_CHECKING:

        @property
        def agreement(self) -> Agreement: ...

        def call(
            self,
            command: int,
            body: bytes = b"",
            fds: Sequence[int] = (),
            *,
            no_reply: bool = False,
        ) -> memoryview: ...

    def feature_get(self, feature: int, data: bytes = b"", *, room: int = 4096) -> bytes:
        """Data of a feature. ``room`` bytes are offered; more is asked for once if needed."""
        for _ in range(2):
            argsz = features.FEATURE.size + room
            body = features.pack_feature(FeatureFlag.GET, feature, data, argsz=argsz)
            reply = self.call(Command.DEVICE_FEATURE, body)
            need(reply, features.FEATURE.size, "DEVICE_FEATURE")
            needed, _ = features.FEATURE.unpack_from(reply)
            if needed <= argsz:
                return bytes(reply[features.FEATURE.size :])
            room = min(needed, self.agreement.peer_max_transfer + 4096) - features.FEATURE.size
        raise bad("DEVICE_FEATURE", f"feature {feature} needs more room each time")

    def feature_set(self, feature: int, data: bytes = b"") -> bytes:
        """Set a feature; returns its data as the device took it."""
        body = features.pack_feature(FeatureFlag.SET, feature, data)
        reply = self.call(Command.DEVICE_FEATURE, body)
        return bytes(reply[features.FEATURE.size :])

    def feature_probe(self, feature: int, methods: int = 0) -> bool:
        """Does the device have the feature, with all of ``methods`` (FeatureFlag)?"""
        try:
            body = features.pack_feature(FeatureFlag.PROBE | methods, feature)
            self.call(Command.DEVICE_FEATURE, body)
        except Refusal:
            return False
        return True

    # --- migration -----------------------------------------------------------------------------

    def migration_flags(self) -> int:
        """MigrationFlag bits that the device supports."""
        data = self.feature_get(Feature.MIGRATION)
        need(data, features.MIGRATION.size, "MIGRATION")
        flags: int = features.MIGRATION.unpack_from(data)[0]
        return flags

    def migration_state(self) -> MigState:
        data = self.feature_get(Feature.MIG_DEVICE_STATE)
        need(data, features.DEVICE_STATE.size, "MIG_DEVICE_STATE")
        number, _ = features.DEVICE_STATE.unpack_from(data)
        try:
            return MigState(number)
        except ValueError as error:
            raise bad("MIG_DEVICE_STATE", f"unknown state {number}") from error

    def set_migration_state(self, state: MigState) -> None:
        """Returns when the device is there; it walks the legal path itself."""
        self.feature_set(Feature.MIG_DEVICE_STATE, features.DEVICE_STATE.pack(state, 0xFFFF_FFFF))

    def migration_read(self, count: int) -> bytes:
        """At most ``count`` bytes of saved state, one message; fewer mean that it ends here."""
        reply = self.call(Command.MIG_DATA_READ, features.pack_mig_data(size=count))
        _, size, data = features.parse_mig_data(reply)
        if size > count or len(data) != size:
            raise bad("MIG_DATA_READ", f"{len(data)} bytes, {size} announced, {count} asked for")
        return bytes(data)

    def migration_write(self, data: bytes) -> None:
        """Load saved state, in as many messages as needed."""
        step = max(self.agreement.peer_max_transfer, 1)
        for at in range(0, len(data), step):
            part = features.pack_mig_data(data[at : at + step])
            self.call(Command.MIG_DATA_WRITE, part)

    def save_state(self) -> bytes:
        """Everything that the device has to save, read until it ends."""
        step = max(self.agreement.peer_max_transfer, 1)
        parts: list[bytes] = []
        while True:
            part = self.migration_read(step)
            parts.append(part)
            if len(part) < step:
                return b"".join(parts)

    # --- dirty pages ---------------------------------------------------------------------------

    def start_dirty_log(self, page_size: int, ranges: Sequence[tuple[int, int]] = ()) -> int:
        """Log device writes; returns the page size that the device took."""
        data = features.pack_logging(page_size, ranges)
        reply = self.feature_set(Feature.DMA_LOGGING_START, data)
        return features.parse_logging(reply)[0]

    def stop_dirty_log(self) -> None:
        self.feature_set(Feature.DMA_LOGGING_STOP)

    def dirty_pages(self, address: int, size: int, page_size: int) -> bytes:
        """Bitmap of pages written since the last call, LSB first, in whole 64-bit words."""
        report = features.Report(address, size, page_size)
        room = features.REPORT.size + report.bitmap_bytes
        packed = features.REPORT.pack(*report)
        data = self.feature_get(Feature.DMA_LOGGING_REPORT, packed, room=room)
        need(data, room, "DMA_LOGGING_REPORT")
        return data[features.REPORT.size :]

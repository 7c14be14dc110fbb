"""Where the daemon keeps things; the one place that reads ``ACCELVISOR_*`` from an environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Paths:
    """Directories and files of one daemon. The variables move them, so that a daemon runs without
    root and several run on one machine."""

    run: Path
    state: Path
    config: Path

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Paths:
        return cls(
            run=Path(environ.get("ACCELVISOR_RUN_DIR") or "/run/accelvisor"),
            state=Path(environ.get("ACCELVISOR_STATE_DIR") or "/var/lib/accelvisor"),
            config=Path(environ.get("ACCELVISOR_CONFIG") or "/etc/accelvisor/accelvisor.toml"),
        )

    @property
    def admin_socket(self) -> Path:
        return self.run / "admin"

    @property
    def lock(self) -> Path:
        return self.run / "accelvisord.lock"

    @property
    def functions(self) -> Path:
        return self.run / "function"

    @property
    def database(self) -> Path:
        return self.state / "accelvisor.db"

    @property
    def specs(self) -> Path:
        """What the daemon writes for and about functions; they only read it."""
        return self.run / "spec"

    def function(self, uuid: str) -> FunctionPaths:
        return FunctionPaths(self.functions / uuid, self.specs / f"{uuid}.json")


def peer(domain_uuid: str | None) -> str | None:
    """How a domain's QEMU is called among those that a function may let in: by the name that
    libvirt gives its AppArmor profile, which the packaged rule compares."""
    return None if domain_uuid is None else f"libvirt-{domain_uuid}"


@dataclass(frozen=True, slots=True)
class FunctionPaths:
    """Files of one function (docs/contracts.md, 2).

    Attributes:
        directory: the function's own, writable for it: see :mod:`accelvisor.daemon.files`.
        spec: its specification, which it can only read.
    """

    directory: Path
    spec: Path

    @property
    def vfio_socket(self) -> Path:
        """For those who run this host; no QEMU may open it."""
        return self.directory / "vfio.sock"

    def domain_socket(self, domain_uuid: str) -> Path:
        """For a domain's QEMU, and there while that domain has the function."""
        return self.directory / f"{peer(domain_uuid)}"

    @property
    def holder_socket(self) -> Path:
        return self.directory / "holder.sock"

    @property
    def control_socket(self) -> Path:
        return self.directory / "control.sock"

    @property
    def process(self) -> Path:
        """The process's own ``/proc/self/stat`` at its start: pid and start time."""
        return self.spec.with_suffix(".process")

    @property
    def log(self) -> Path:
        return self.spec.with_suffix(".log")

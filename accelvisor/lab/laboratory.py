"""The laboratory itself: images, network, hosts and packages put together, and taken away again."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from accelvisor.errors import ConflictError, NotFoundError, UsageError
from accelvisor.lab import (
    container,
    guestimage,
    images,
    network,
    package,
    requirements,
    state,
    tree,
)
from accelvisor.lab.container import Place
from accelvisor.lab.host import LabHost
from accelvisor.lab.process import ProcessId
from accelvisor.lab.progress import Progress
from accelvisor.lab.reaper import Reaper
from accelvisor.lab.state import HostState, LabState
from accelvisor.lab.takedown import reap, take_down


def chosen_name() -> str:
    """The laboratory that commands mean: ACCELVISOR_LAB_NAME, or this tree's and user's own."""
    return state.checked_name(os.environ.get("ACCELVISOR_LAB_NAME") or tree.default_name())


class Laboratory:
    """One or more lab hosts on a network of their own.

    As a context manager it lives as long as its block (and, should the process be killed, as long
    as the process: its hosts die with it, and a reaper takes away the rest). A ``persistent`` one
    outlives its process and is found again by its name.

    Args:
        hosts: how many hosts to boot.
        name: keeps several laboratories apart; made from the pid unless persistent.
        persistent: leave it running when this process ends.
        install: install accelvisor's packages, built from this source tree.
        progress: where progress is drawn.
    """

    def __init__(
        self,
        hosts: int = 1,
        *,
        name: str | None = None,
        persistent: bool = False,
        install: bool = True,
        progress: Progress | None = None,
    ) -> None:
        if not 1 <= hosts <= state.MAX_HOSTS:
            raise UsageError(f"1 to {state.MAX_HOSTS} hosts, not {hosts}", where="lab")
        own = chosen_name() if persistent else f"p{os.getpid()}"
        self.name = state.checked_name(name or own)
        self.hosts: list[LabHost] = []
        self.progress = progress or Progress()
        self._wanted = hosts
        self._persistent = persistent
        self._install = install
        self._state = LabState(self.name, None if persistent else ProcessId.own())
        self._reaper: Reaper | None = None

    @classmethod
    def attach(cls, name: str | None = None, *, progress: Progress | None = None) -> Laboratory:
        """A laboratory that is running already; leaving it does not take it down."""
        wanted = state.checked_name(name) if name else chosen_name()
        found = state.load(wanted)
        if found is None or found.abandoned or not found.hosts:
            raise NotFoundError(
                f"no laboratory {wanted!r} is running",
                code="lab-not-running",
                where="lab",
                hint="start one: python -m accelvisor.lab up",
            )
        lab = cls(len(found.hosts), name=wanted, persistent=True, progress=progress)
        lab._state = found
        lab._present()
        return lab

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._persistent:
            self.down()

    def up(self) -> None:
        """Bring it up: what runs already stays, what is missing is built or booted."""
        requirements.require()
        reap(self.progress)
        if not self._persistent and self._reaper is None:
            # Before there is anything to take away.
            self._reaper = Reaper(self.name)
        try:
            self._up()
        finally:
            if not self.hosts:
                self._dismiss()

    def _up(self) -> None:
        # Built before the lock is taken: a cold cache takes minutes.
        image = images.host(self.progress)
        guest = guestimage.guest(self.progress)
        with state.locked(self.name):
            fresh = not self._adopt()
            try:
                self._boot(image, guest)
                if self._install:
                    self._install_packages(image)
            except BaseException:
                # One that ran before stays: a package that does not build is no reason to lose it.
                if fresh:
                    take_down(self._state)
                    self.hosts = []
                raise

    def down(self) -> None:
        """Take all of it away."""
        with state.locked(self.name):
            take_down(self._state)
        self.hosts = []
        self._dismiss()

    def _dismiss(self) -> None:
        if self._reaper is not None:
            self._reaper.dismiss()
            self._reaper = None

    def add_hosts(self, count: int) -> None:
        """Boot further hosts until there are ``count`` of them."""
        if count > len(self.hosts):
            self._wanted = count
            self.up()

    def install(self) -> None:
        """Install this source tree's packages, if they differ from the installed ones."""
        with state.locked(self.name):
            self._install_packages(images.host(self.progress))

    # --- steps -----------------------------------------------------------------------------------

    def _adopt(self) -> bool:
        """Take over what runs under this name, if any; refuse when it belongs to somebody else."""
        found = state.load(self.name)
        if found is None:
            return False
        found.refuse_foreign()
        if found.owner is not None and found.owner != ProcessId.own():
            raise ConflictError(
                f"the laboratory {self.name!r} belongs to process {found.owner.pid}",
                code="lab-busy",
                where="lab",
                hint="choose another name with ACCELVISOR_LAB_NAME",
            )
        self._state = found
        for record in [host for host in found.hosts if host.leader is None or _dead(host)]:
            # A host that died under a persistent laboratory is replaced.
            container.remove(Place.of(self._state, record.index), record)
            found.hosts.remove(record)
        return True

    def _boot(self, image: Path, guest: Path) -> None:
        self._state.save()
        if not network.namespaces(self.name):
            network.create_switch(self.name)
        _offer(guest, self._state.directory / "images")
        present = {record.index for record in self._state.hosts}
        for index in range(1, self._wanted + 1):
            if index not in present:
                self._boot_host(index, image)
        self._present()

    def _boot_host(self, index: int, image: Path) -> None:
        place = Place.of(self._state, index)
        record = HostState(index)
        self._state.hosts.append(record)
        self._state.save()
        with self.progress.step(f"{place.hostname}: booting"):
            network.remove_host(self.name, index)
            network.connect_host(self.name, index)
            container.mount(place, image)
            container.personalise(place, state.MAX_HOSTS)
            container.boot(place, record, mortal=not self._persistent)
        self._state.save()

    def _present(self) -> None:
        self._state.hosts.sort(key=lambda record: record.index)
        self.hosts = [
            LabHost(Place.of(self._state, record.index), record) for record in self._state.hosts
        ]

    def _install_packages(self, image: Path) -> None:
        built = package.build(self.progress)
        disk = guestimage.layer(package.package(built, package.GUEST), image, self.progress)
        shared = self._state.directory / "images"
        _link(disk, shared / "layer.squashfs")
        debs = [package.package(built, name) for name in (package.GUEST, package.HOST)]
        for host in self.hosts:
            self._install_on(host, debs)
        self._state.package = built.name
        self._state.save()

    def _install_on(self, host: LabHost, debs: list[Path]) -> None:
        """As a user would; once per build of the packages, which leaves a mark on the host."""
        mark = f"/run/accelvisor-lab-{debs[0].parent.name}"
        if host.run(["test", "-e", mark], check=False).returncode == 0:
            return
        with self.progress.step(f"{host.name}: installing accelvisor's packages"):
            targets = [f"/root/{deb.name}" for deb in debs]
            for deb, target in zip(debs, targets, strict=True):
                host.push(deb, target)
            host.run(["dpkg", "--install", "--force-confnew", *targets], timeout=180)
            host.run(["touch", mark])


def _dead(record: HostState) -> bool:
    return record.leader is None or not record.leader.alive()


def _offer(guest: Path, shared: Path) -> None:
    """Show the guest images to the hosts: hard links, since they are large and never change."""
    shared.mkdir(parents=True, exist_ok=True)
    for name in ("vmlinux", "initrd.img", "base.squashfs"):
        _link(guest / name, shared / name)
    if not (shared / "layer.squashfs").exists():
        _link(guest / "empty.squashfs", shared / "layer.squashfs")


def _link(source: Path, target: Path) -> None:
    work = target.with_name(f".{target.name}.new")
    work.unlink(missing_ok=True)
    os.link(source, work)
    os.replace(work, target)

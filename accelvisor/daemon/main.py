"""accelvisord: the command. Options, logging, signals; everything else is :mod:`.daemon`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TextIO

import accelvisor
from accelvisor.daemon import config as configuration
from accelvisor.daemon.daemon import Daemon, Setup
from accelvisor.daemon.notify import Notifier, adopt_listener, take_listeners
from accelvisor.daemon.paths import Paths
from accelvisor.errors import AccelvisorError, CallerError, ConfigError
from accelvisor.limits import LIMITS

LOG = logging.getLogger(__name__)
#: The name that accelvisor.socket gives its descriptor (FileDescriptorName=).
LISTENER = "admin"

_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}


class PriorityFormatter(logging.Formatter):
    """Lines that begin with a syslog priority in angle brackets (sd-daemon(3)), one for each line
    of a traceback too."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_PRIORITIES.get(record.levelno, 2)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def parser() -> argparse.ArgumentParser:
    """The options; documented in accelvisord(8)."""
    made = argparse.ArgumentParser(
        prog="accelvisord", description="Own this host's accelerator cards and their functions."
    )
    made.add_argument("--config", metavar="FILE", help="configuration file")
    made.add_argument(
        "--check-config", action="store_true", help="check the configuration, print all problems"
    )
    made.add_argument("--version", action="version", version=accelvisor.__version__)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 refused or failed, 2 usage or configuration."""
    options = parser().parse_args(argv)
    paths = Paths.from_environment(os.environ)
    if options.config:
        paths = replace(paths, config=Path(options.config))
    if options.check_config:
        return check_config(paths.config, sys.stdout, sys.stderr)
    set_up_logging(sys.stderr)
    try:
        leave(asyncio.run(run(paths, os.environ)))
    except AccelvisorError as error:
        LOG.error("%s [%s] (%s)", error.message, error.code, error.where)
        if error.hint:
            LOG.error("hint: %s", error.hint)
        leave(2 if isinstance(error, ConfigError) else 1)


def leave(code: int) -> NoReturn:
    """End the process now. A thread that waits in libvirt for a guest would hold a normal exit up
    for minutes; everything that must be kept is committed by here."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def check_config(path: Path, out: TextIO, err: TextIO) -> int:
    """Print every problem, or that there is none."""
    _, problems = configuration.check(path)
    for problem in problems:
        print(f"{problem.where}: {problem.message} [{problem.code}]", file=err)
        if problem.hint:
            print(f"  hint: {problem.hint}", file=err)
    if problems:
        return 2
    files = "is valid" if path.exists() else "does not exist: the built-in defaults are used"
    print(f"{path} {files}", file=out)
    return 0


def set_up_logging(stream: TextIO) -> None:
    """To ``stream``: plain for a terminal, with priorities for the journal."""
    handler = logging.StreamHandler(stream)
    if stream.isatty():
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    else:
        handler.setFormatter(PriorityFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


async def run(paths: Paths, environ: MutableMapping[str, str]) -> int:
    """From the environment to a daemon that serves until it is told to stop."""
    notifier = Notifier.from_environment(environ, os.getpid())
    inherited = take_listeners(environ, os.getpid())
    config = configuration.load(paths.config)
    logging.getLogger().setLevel(config.daemon.log_level.upper())
    listener = adopt_listener(inherited.pop(LISTENER)) if LISTENER in inherited else None
    for name, fd in inherited.items():
        LOG.warning('the socket "%s" was passed, but only "%s" is used', name, LISTENER)
        os.close(fd)
    daemon = Daemon(Setup(config, paths, notifier, listener))
    stop = asyncio.Event()
    reload = asyncio.Event()
    loop = asyncio.get_running_loop()
    # asyncio's own pool has six threads on two processors: VMs that move would keep the journal,
    # the orders and the switch-over of others waiting.
    loop.set_default_executor(ThreadPoolExecutor(LIMITS.daemon_threads, "accelvisord"))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    await daemon.start()
    try:
        reloads = loop.create_task(_reload_on(reload, daemon, paths, notifier))
        await stop.wait()
        reloads.cancel()
    finally:
        await daemon.stop()
        # asyncio.run() would wait for its own threads too.
        loop.set_default_executor(ThreadPoolExecutor(1))
    return 0


async def _reload_on(
    event: asyncio.Event, daemon: Daemon, paths: Paths, notifier: Notifier
) -> None:
    while True:
        await event.wait()
        event.clear()
        notifier.reloading(time.monotonic_ns() // 1000)
        try:
            config = await asyncio.to_thread(configuration.load, paths.config)
            await daemon.reload(config)
            logging.getLogger().setLevel(config.daemon.log_level.upper())
            notifier.ready("configuration loaded anew")
            LOG.info("configuration loaded anew")
        except CallerError as error:
            # The old one stays in force: a typing error must not take the host down.
            LOG.error("%s: %s [%s]; the old configuration stays", error.where, error, error.code)
            notifier.ready("running with the old configuration: the new one is wrong")


if __name__ == "__main__":
    sys.exit(main())

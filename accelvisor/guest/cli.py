"""``accelguest``: look at, test, measure and use this VM's accelerator functions.

Imports stay light: numpy comes in only where arrays are handled, since under an emulated CPU it
takes longer to import than most commands take to run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelvisor.errors import (
    AccelvisorError,
    ConflictError,
    PermissionDenied,
    UnavailableError,
    UsageError,
)

if TYPE_CHECKING:
    from accelvisor.guest.function import Function

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_PERMISSION = 4
EXIT_VERIFICATION = 6

#: Codes that mean that there is no function to talk to, whatever their class.
_UNREACHABLE = frozenset({"device-not-found", "device-in-transition", "device-broken"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (conventions in docs/guest.md)."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except AccelvisorError as error:
        return _complain(error, getattr(options, "json", False) is True)
    except KeyboardInterrupt:
        print("accelguest: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; nothing more to say, and no traceback at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    """The command line. A test compares it with the man page."""
    parser = argparse.ArgumentParser(
        prog="accelguest", description="Use the accelerator functions of this virtual machine."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", metavar="BDF", help="PCI address (needed if there are several)")
    common.add_argument(
        "--driver", choices=("sysfs", "vfio"), help="how to reach it (default: what fits)"
    )
    plain = argparse.ArgumentParser(add_help=False)
    plain.add_argument("--json", action="store_true", help="print JSON instead of text")
    both = [common, plain]

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str, parents: Any = both
    ) -> Any:
        command = commands.add_parser(name, parents=parents, help=text, description=text)
        command.set_defaults(run=run)
        return command

    info = add("info", _info, "Show the functions of this VM and what they can do.")
    info.add_argument(
        "--instructions", action="store_true", help="list the instructions with their arguments"
    )
    add("selftest", _selftest, "Try every path to a function and every instruction.")
    bench = add("bench", _bench, "Measure latency, bandwidth and speed as this VM sees them.")
    bench.add_argument(
        "group", nargs="*", metavar="GROUP", help="latency, rate, bandwidth, matmul (default: all)"
    )
    bench.add_argument("--quick", action="store_true", help="a fifth of the time, wider spread")

    run = add("run", _run, "Classify a network file's test set on the function.")
    run.add_argument("file", metavar="FILE", type=Path, help="network: an .npz, see accelguest(1)")
    run.add_argument(
        "--singles", type=int, default=100, metavar="N",
        help="samples to classify one by one, for the latency (default: 100)",
    )  # fmt: skip
    run.add_argument("--show", type=int, default=2, metavar="N", help="pictures (default: 2)")
    run.add_argument("--save", type=Path, metavar="OUT", help="write the logits to an .npz")

    train = add("train", _train, "Train a network on the function, on a data file.")
    train.add_argument("file", metavar="FILE", type=Path, help="data: an .npz, see accelguest(1)")
    train.add_argument(
        "--hidden", default="64", metavar="N[,N]", help="sizes of hidden layers (default: 64)"
    )
    train.add_argument("--epochs", type=int, default=10, metavar="N", help="default: 10")
    train.add_argument("--batch", type=int, default=32, metavar="N", help="default: 32")
    train.add_argument("--rate", type=float, default=0.15, metavar="R", help="default: 0.15")
    train.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    train.add_argument("--save", type=Path, metavar="OUT", help="write the network to an .npz")

    trace = add("trace", _trace, "Run something on all chips, and show who ran when.", [common])
    trace.add_argument(
        "--run", dest="what", choices=("demo", "train"), default="demo",
        help="what to run (default: demo)",
    )
    trace.add_argument(
        "--json", nargs="?", const=True, metavar="FILE",
        help="write a Chrome trace; without FILE, print the device's own spans",
    )  # fmt: skip
    trace.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    trace.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    return parser


# --- commands -------------------------------------------------------------------------------------


def _open(options: argparse.Namespace) -> Function:
    from accelvisor.guest.function import Function

    name = f"accelguest {options.command}"
    return Function.open(options.device, driver=options.driver, name=name)


def _info(options: argparse.Namespace) -> int:
    from accelvisor.guest.discovery import find, select

    devices = [select(options.device)] if options.device else find()
    if not devices:
        select()  # says that there are none, and what to do
    described = [_describe(device, options) for device in devices]
    if options.json:
        _print_json({"functions": described})
        return EXIT_DONE
    for i, told in enumerate(described):
        if i:
            print()
        _print_function(told)
    return EXIT_DONE


def _describe(device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one function: from the device where it can be opened, else from PCI."""
    from accelvisor.guest.discovery import choose
    from accelvisor.guest.function import Function

    told: dict[str, Any] = {
        "bdf": device.bdf,
        "driver": choose(device, options.driver, os.environ),
        "iommu_group": device.iommu_group,
    }
    try:
        with Function.open(device.bdf, driver=told["driver"], name="accelguest info") as fn:
            told.update(_identity(fn.identity, fn.state))
            told["device"] = fn.info()
            table = [row.declaration for row in fn.instructions.values()]
            told["instructions"] = table if options.instructions else [r["name"] for r in table]
    except ConflictError as error:
        if error.code != "queue-busy":
            raise
        told.update(_registers_only(device.bdf, told["driver"]))
        told["busy"] = str(error)
    return told


def _registers_only(bdf: str, driver: str) -> dict[str, Any]:
    """What can be had while other processes hold all queues."""
    from accelvisor.guest.discovery import discover
    from accelvisor.guest.registers import Registers

    transport = discover(bdf, driver=driver)
    try:
        registers = Registers(transport)
        return _identity(registers.identity(), registers.state())
    finally:
        transport.close()


def _identity(identity: Any, state: Any) -> dict[str, Any]:
    from accelvisor.abi.registers import Status

    return {
        "uuid": identity.uuid,
        "abi": f"{identity.abi[0]}.{identity.abi[1]}",
        "cores": identity.cores,
        "chips": identity.chips,
        "memory_bytes": identity.memory_bytes,
        "window_bytes": identity.window_bytes,
        "queues": identity.queues,
        "ring_entries": identity.ring_entries,
        "status": [flag.name.lower() for flag in Status if flag in state.status and flag.name],
        "epoch": state.epoch,
        "resets": state.reset_count,
    }


def _selftest(options: argparse.Namespace) -> int:
    from accelvisor.guest import selftest

    outcomes = []
    with _open(options) as fn:
        for outcome in selftest.run(fn):
            outcomes.append(outcome)
            if not options.json:
                mark = {"ok": "ok    ", "failed": "FAILED", "absent": "absent"}[outcome.state]
                print(f"{mark}  {outcome.name}: {outcome.detail}", flush=True)
    failed = [o for o in outcomes if o.state == "failed"]
    if options.json:
        _print_json({"ok": not failed, "checks": [o.to_dict() for o in outcomes]})
    else:
        passed = sum(o.state == "ok" for o in outcomes)
        seconds = sum(o.seconds for o in outcomes)
        print(f"{passed} of {len(outcomes)} checks passed, {len(failed)} failed, {seconds:.1f} s")
    return EXIT_VERIFICATION if failed else EXIT_DONE


def _bench(options: argparse.Namespace) -> int:
    from accelvisor.guest import bench

    figures = []
    with _open(options) as fn:
        for figure in bench.run(fn, options.group, quick=options.quick):
            figures.append(figure)
            if not options.json:
                spread = f"{figure.low:,.4g} to {figure.high:,.4g}"
                print(
                    f"{figure.name:<28} {figure.value:>12,.4g} {figure.unit:<8} {spread:<22} "
                    f"{figure.against}",
                    flush=True,
                )
    if options.json:
        _print_json({"figures": [f.to_dict() for f in figures]})
    return EXIT_DONE


def _run(options: argparse.Namespace) -> int:
    from accelvisor.guest import models

    model = models.load_model(options.file)
    with _open(options) as fn:
        told = models.run_model(fn, model, singles=max(options.singles, 0))
    outputs = told.pop("outputs")
    if options.save:
        import numpy as np

        np.savez_compressed(options.save, logits=outputs)
    if options.json:
        _print_json(told)
        return EXIT_DONE
    sizes = "-".join(map(str, told["sizes"]))
    for i in range(min(options.show, told["samples"])):
        picture = _picture(model.test.x[i])
        if picture:
            print(f"{picture}\n  is a {told['classes'][i]} (truly {told['labels'][i]})\n")
    print(f"network    {sizes}, {told['activation']}")
    print(f"accuracy   {told['accuracy']:.2%} ({told['correct']} of {told['samples']})")
    print(f"batch      {told['batch_seconds'] * 1e3:.1f} ms for all {told['samples']} samples")
    if told["latency_us"]:
        p50, p99 = told["latency_us"]["p50"], told["latency_us"]["p99"]
        print(f"latency    {p50:.0f} us for one sample (99 % within {p99:.0f} us)")
    print(f"logits     sha256 {told['logits_sha256']}")
    return EXIT_DONE


def _train(options: argparse.Namespace) -> int:
    from accelvisor.guest import models

    hidden = _sizes(options.hidden)
    if options.epochs < 1 or options.batch < 1 or not 0 < options.rate < 1e6:
        raise UsageError("--epochs, --batch and --rate must be positive", where="command line")
    train, test = models.load_data(options.file)

    def progress(epoch: int, loss: float) -> None:
        if not options.json:
            print(f"epoch {epoch:>3} of {options.epochs}  loss {loss:.4f}", flush=True)

    with _open(options) as fn:
        told = models.train_model(
            fn, train, test, hidden=hidden, epochs=options.epochs, batch=options.batch,
            rate=options.rate, seed=options.seed, progress=progress,
        )  # fmt: skip
    parameters = told.pop("parameters")
    if options.save:
        scale = models.scale_of(models.read(options.file))
        models.save_model(options.save, parameters, test, scale)
    if options.json:
        _print_json(told)
        return EXIT_DONE
    per_step = told["seconds"] / told["steps"] * 1e3
    print(f"network    {'-'.join(map(str, told['sizes']))}, seed {told['seed']}")
    print(f"accuracy   {told['accuracy']:.2%} ({told['correct']} of {len(test.x)} test samples)")
    print(f"time       {told['seconds']:.2f} s, {per_step:.2f} ms a step, {told['steps']} steps")
    print(f"clock      {told['cycles']:,} cycles of the function's model clock")
    print(f"weights    sha256 {told['weights_sha256']}")
    return EXIT_DONE


def _trace(options: argparse.Namespace) -> int:
    from accelvisor import timeline
    from accelvisor.guest import tracing

    with _open(options) as fn:
        tracing.RUNS[options.what](fn)
        told = fn.trace()
        title = f"accelguest trace --run {options.what}, function {fn.identity.uuid}"
    trace = timeline.read(told)
    if options.json is True:
        _print_json(told)
    elif options.json:
        _write(options.json, json.dumps(timeline.chrome(trace.spans, trace.dropped)) + "\n")
    if options.svg:
        _write(options.svg, timeline.svg(trace.spans, title))
    if options.png:
        _write(options.png, timeline.png(trace.spans, title))
    if options.json is not True:
        print(tracing.table(trace))
    return EXIT_DONE


def _write(path: Path | str, data: str | bytes) -> None:
    try:
        Path(path).write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", where="command line") from error


# --- for people -----------------------------------------------------------------------------------


def _print_function(told: dict[str, Any]) -> None:
    print(f"{told['bdf']}  accelerator function {told['uuid']}")
    device = told.get("device", {})
    used = device.get("memory_used_bytes")
    rows = [
        ("state", ", ".join(told["status"]) or "not ready"),
        ("reached by", told["driver"]),
        ("memory", _bytes(told["memory_bytes"]) + (f", {_bytes(used)} in use" if used else "")),
        ("compute", f"{_count(told['cores'], 'core')} on {_count(told['chips'], 'chip')}"),
        ("window", _bytes(told["window_bytes"])),
        ("queues", f"{told['queues']} of {told['ring_entries']} entries"),
        ("interface", f"{told['abi']}, epoch {told['epoch']}, {_count(told['resets'], 'reset')}"),
    ]
    if "profile" in device:
        rows.insert(1, ("profile", device["profile"]))
    if "busy" in told:
        rows.append(("note", told["busy"]))
    table = told.get("instructions", [])
    if table and isinstance(table[0], str):
        rows.append(("instructions", f"{len(table)} (list them with --instructions)"))
    for name, value in rows:
        print(f"  {name:<13} {value}")
    if table and not isinstance(table[0], str):
        from accelvisor.guest.instructions import instructions_from

        print("\n  instructions")
        for row in instructions_from(table).values():
            print(f"    {row.name}{row.signature()}\n        {row.doc}")


def _picture(values: Any) -> str:
    """A square image in characters; empty when the sample is no square or too large."""
    side = int(len(values) ** 0.5)
    if side * side != len(values) or not 4 <= side <= 32:
        return ""
    low, high = float(values.min()), float(values.max())
    shades = " .:-=+*#%@"
    scale = (len(shades) - 1) / ((high - low) or 1.0)
    dots = [2 * shades[int((v - low) * scale)] for v in values]
    return "\n".join("  " + "".join(dots[at : at + side]) for at in range(0, len(dots), side))


def _bytes(n: int) -> str:
    size = float(n)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        sizes = (0,)
    if not all(0 < n <= 65536 for n in sizes):
        raise UsageError(
            f"--hidden {text}", where="command line", hint="positive numbers, e.g. 64 or 128,64"
        )
    return sizes


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _complain(error: AccelvisorError, as_json: bool) -> int:
    if as_json:
        _print_json({"error": error.to_dict()})
    print(f"accelguest: {error} [{error.code}]", file=sys.stderr)
    if error.hint:
        print(f"  hint: {error.hint}", file=sys.stderr)
    return exit_code(error)


def exit_code(error: AccelvisorError) -> int:
    """The exit code for an error."""
    if isinstance(error, UsageError):
        return EXIT_USAGE
    if isinstance(error, PermissionDenied):
        return EXIT_PERMISSION
    if error.code in _UNREACHABLE or isinstance(error, UnavailableError):
        return EXIT_UNREACHABLE
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())

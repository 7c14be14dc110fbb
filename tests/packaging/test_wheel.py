"""``pip install``: what the wheel brings, where there is nothing of this source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

_TREE = Path(__file__).parents[2]
_TIMEOUT_S = 240


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel, and the wheel."""

    root: Path
    wheel: Path

    def run(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A program of the environment, away from the source tree."""
        program, *rest = words
        return subprocess.run(
            [self.root / "bin" / program, *rest],
            cwd=self.root,
            env={"PATH": os.environ["PATH"], "HOME": str(self.root), "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            check=check,
            timeout=_TIMEOUT_S,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    work = tmp_path_factory.mktemp("wheel")
    # A copy: building leaves directories beside the sources.
    source = work / "source"
    wanted = ("accelvisor", "pyproject.toml", "README.md", "LICENSE")
    for name in wanted:
        path = _TREE / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            source.mkdir(exist_ok=True)
            shutil.copy2(path, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", work, source],
        check=True, capture_output=True, timeout=_TIMEOUT_S,
    )  # fmt: skip
    (wheel,) = work.glob("accelvisor-*.whl")
    root = work / "venv"
    venv.create(root, with_pip=False)
    subprocess.run(
        [*pip, "--python", root / "bin/python", "install", "--no-deps", "--no-index", wheel],
        check=True, capture_output=True, timeout=_TIMEOUT_S,
    )  # fmt: skip
    # numpy, msgspec and so on are this environment's; its link to the source tree is not followed,
    # as a .pth file within a directory that a .pth file names is not read.
    lower = sysconfig.get_paths(vars={"base": str(root), "platbase": str(root)})["purelib"]
    (Path(lower) / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return Installed(root, wheel)


def test_what_is_imported_is_the_wheel(installed: Installed) -> None:
    said = installed.run("python", "-c", "import accelvisor; print(accelvisor.__file__)")
    assert Path(said.stdout.strip()).is_relative_to(installed.root)


def test_it_has_every_file_that_the_code_reads(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = set(wheel.namelist())
    package = _TREE / "accelvisor"
    for pattern in ("**/*.py", "**/*.varlink", "**/py.typed"):
        wanted = {
            str(path.relative_to(_TREE))
            for path in package.glob(pattern)
            if not path.is_relative_to(package / "lab")  # works from a checkout only
        }
        assert wanted
        assert wanted <= names
    assert not [name for name in names if name.startswith("tests/")]


def test_accelctl_runs_and_finds_its_interface(installed: Installed) -> None:
    assert installed.run("accelctl", "version", check=False).stdout.startswith("accelctl ")
    code = (
        "from importlib import resources; import accelvisor.control as c;"
        "print([p.name for p in resources.files(c).iterdir() if p.name.endswith('.varlink')])"
    )
    assert "io.accelvisor.Admin.varlink" in installed.run("python", "-c", code).stdout


def test_accelvisord_checks_its_configuration(installed: Installed, tmp_path: Path) -> None:
    config = tmp_path / "accelvisor.toml"
    config.write_text('[daemon]\nsupervisor = "subprocess"\n', encoding="utf-8")
    installed.run("accelvisord", "--config", config, "--check-config")
    config.write_text("[daemon]\nsupervisor = 7\n", encoding="utf-8")
    refused = installed.run("accelvisord", "--config", config, "--check-config", check=False)
    assert refused.returncode != 0
    assert "supervisor" in refused.stderr


def test_accelguest_tells_its_commands(installed: Installed) -> None:
    said = installed.run("accelguest", "--help").stdout
    for word in ("info", "selftest"):
        assert word in said


def test_every_module_imports(installed: Installed) -> None:
    code = (
        "import importlib, pkgutil, accelvisor\n"
        "for found in pkgutil.walk_packages(accelvisor.__path__, 'accelvisor.'):\n"
        "    if not found.name.endswith('__main__'):\n"
        "        importlib.import_module(found.name)\n"
    )
    installed.run("python", "-W", "error", "-c", code)

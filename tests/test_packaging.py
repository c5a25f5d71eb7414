"""Published files: the wheel and the source distribution have all that `arb` needs."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import arbcli

ROOT = Path(arbcli.__file__).parents[1]
CONTAINERFILE = (ROOT / "Containerfile").read_text()
COPIED = {
    place: sources.split()
    for sources, place in re.findall(r"^COPY (.+) (\S+)$", CONTAINERFILE, re.MULTILINE)
}
"""Files that the container file copies, by their place in the container."""
SOURCES = [name for names in COPIED.values() for name in names]
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def build(kind: str, tree: Path, out: Path) -> Path:
    """Build in a copy of the tree, without looking for anything on the network."""
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.iterdir()
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the source distribution of what the container file takes, and the wheel from that."""
    pytest.importorskip("setuptools", minversion="77", reason="builds the package")
    folder = tmp_path_factory.mktemp("build")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    source = build("sdist", tree, folder / "sdist")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return build("wheel", unpacked, folder / "wheel")


def test_lock_file_has_a_hash_for_every_package_and_the_versions_that_are_promised():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = [re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    versions = {match[1]: match[2] for match in locked}
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wanted in map(Requirement, about["dependencies"]):
        assert wanted.specifier.contains(versions[wanted.name])


def test_container_file_names_existing_files(arb_here):
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {place: (ROOT / names[0]).is_dir() for place, names in COPIED.items()} == {
        "/arb/": False,
        "/arb/arbcli": True,
    }
    built = {"pyproject.toml", about["readme"], *about["license-files"], "arbcli"}
    assert built | {"requirements.lock"} == set(SOURCES)
    assert all((ROOT / name).exists() for name in SOURCES)
    (options,) = re.findall(r'^CMD \["(.+)"\]$', CONTAINERFILE, re.MULTILINE)
    assert arb_here(options).returncode == 0


def test_lowest_packages_are_those_that_are_promised():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["triton"] + extras["plot"] + extras["test"]
    least = dict(re.findall(r"^(\w+)>=([0-9.]+)", "\n".join(wanted), re.MULTILINE))
    lowest = (ROOT / ".ci" / "lowest.txt").read_text()
    pinned = dict(re.findall(r"^(\w+)==([0-9.]+)\.\*$", lowest, re.MULTILINE))
    tools = {"ruff", "setuptools"}  # they only check and build
    least["numpy"] = "2.3"  # no least: the last that Triton 3.6 is interpreted with
    assert pinned == {name: least[name] for name in least.keys() - tools}
    bounds = (ROOT / ".ci" / "bounds").read_text()
    minors = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert re.findall(r"PYTHON=python(\S+)", bounds) == [min(minors), max(minors)]


@pytest.mark.slow
def test_wheel_has_every_module_and_its_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(about))
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "arbcli").rglob("*.py")}
    assert modules | {"arbcli/py.typed", "arbcli/serve/page.html"} <= names
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)
    assert metadata["Version"] == arbcli.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/LICENSE") for name in names)
    assert "# arb" in metadata.get_payload()


@pytest.mark.slow
def test_installed_wheel_runs(wheel, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    place = tmp_path / "place"
    subprocess.run([*command, "--target", str(place), str(wheel)], check=True)
    env = os.environ | {"PYTHONPATH": str(place)}
    for arguments, said in ((["--version"], arbcli.__version__), (["--help"], "export")):
        run = [sys.executable, str(place / "bin" / "arb"), *arguments]
        done = subprocess.run(
            run, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        )
        assert said in done.stdout
    run = [sys.executable, "-c", "import arbcli; print(arbcli.__file__)"]
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(place)

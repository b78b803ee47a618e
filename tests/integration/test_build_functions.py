"""The Lambda zips: what is in them, and that the same sources give the same bytes. Uses the installed packages."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stacks.local.backends import MINISTACK_PYTHON, ROOT

HANDLERS = sorted(folder.parent.name for folder in (ROOT / "functions").glob("*/handler.py"))


def build(output: Path) -> None:
    command = [sys.executable, "scripts/build_functions.py", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


@pytest.fixture(scope="module")
def zips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("functions")
    build(output)
    return output


def test_there_is_one_for_every_handler(zips: Path) -> None:
    assert sorted(path.stem for path in zips.glob("*.zip")) == HANDLERS


def test_two_builds_have_the_same_bytes(zips: Path, tmp_path: Path) -> None:
    build(tmp_path)
    for path in zips.glob("*.zip"):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_nothing_is_written_when_nothing_changed(zips: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in zips.glob("*.zip")}
    build(zips)
    assert {path: path.stat().st_mtime_ns for path in zips.glob("*.zip")} == before


@pytest.mark.parametrize("name", HANDLERS)
def test_a_zip_carries_its_own_handler_and_nothing_of_a_machine(zips: Path, name: str) -> None:
    with zipfile.ZipFile(zips / f"{name}.zip") as archive:
        entries = archive.infolist()
    names = [entry.filename for entry in entries]
    assert names == sorted(names)
    assert {entry.date_time for entry in entries} == {(2020, 1, 1, 0, 0, 0)}
    handlers = [entry for entry in names if entry.startswith("functions/") and entry.endswith("/handler.py")]
    assert handlers == [f"functions/{name}/handler.py"]
    assert "chat/adapters/valkey/lua/cancel.lua" in names
    for left_out in ("__pycache__", "RECORD", "INSTALLER", "tests/", "containers/", "infra/", "boto3/"):
        assert not [entry for entry in names if left_out in entry], left_out
    assert ("functions/meta/openapi.json" in names) == (name == "meta")


@pytest.mark.parametrize("name", HANDLERS)
def test_a_handler_finds_all_it_imports(zips: Path, name: str) -> None:
    """In the Python that runs Lambdas locally: it has boto3, as the Lambda runtime does, and nothing of ours."""
    code = (
        "import ast, importlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "for node in ast.walk(ast.parse(open(sys.argv[2]).read())):\n"
        "    if isinstance(node, ast.ImportFrom): importlib.import_module(node.module)\n"
        "    if isinstance(node, ast.Import): [importlib.import_module(one.name) for one in node.names]\n"
    )
    folder = zips / f"unpacked-{name}"
    with zipfile.ZipFile(zips / f"{name}.zip") as archive:
        archive.extractall(folder)
    handler = folder / "functions" / name / "handler.py"
    environment = {"PATH": "/usr/bin:/bin", "AWS_REGION": "eu-central-1", "POWERTOOLS_TRACE_DISABLED": "true"}
    argv = [str(MINISTACK_PYTHON), "-I", "-c", code, str(folder), str(handler)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

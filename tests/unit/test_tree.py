"""The tree stays readable: small files and functions, text that is about the product, no addresses of indexes."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("chat", "functions", "containers", "infra", "stacks", "scripts", "tests")
MOST_LINES = 400
MOST_FUNCTION_LINES = 60
INDEX_HOSTS = re.compile(rb"\b(pypi|pythonhosted|pytorch|npmjs)\.(org|com)\b")


def tracked(*folders: str) -> list[Path]:
    """Files that git knows, or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    return [ROOT / name.decode() for name in listed if name and (ROOT / name.decode()).is_file()]


def modules(*folders: str) -> list[Path]:
    return [path for path in tracked(*folders) if path.suffix == ".py"]


def named(paths: list[Path]) -> list[object]:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of every function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", named(modules(*CODE)))
def test_a_file_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", named(modules("chat", "functions", "containers", "infra", "stacks", "scripts")))
def test_functions_are_short(path: Path) -> None:
    assert [found for found in functions(path) if found[1] > MOST_FUNCTION_LINES] == []


@pytest.mark.parametrize("path", named(modules("chat", "functions", "containers", "infra", "stacks", "scripts")))
def test_a_module_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("path", named(tracked()))
def test_no_file_names_a_package_index(path: Path) -> None:
    assert INDEX_HOSTS.search(path.read_bytes()) is None


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_every_locked_package_has_hashes(path: Path) -> None:
    entries = re.split(r"\n(?=[A-Za-z0-9])", path.read_text())
    pinned = [entry for entry in entries if re.match(r"[A-Za-z0-9]", entry)]
    assert pinned
    for entry in pinned:
        assert re.match(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==\S+", entry), entry[:80]
        assert "--hash=sha256:" in entry, entry[:80]


def test_locks_agree_where_they_share_a_package() -> None:
    """What is tested is what is deployed: containers and functions have the versions of dev."""

    def versions(name: str) -> dict[str, str]:
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        return dict(re.findall(r"^([A-Za-z0-9._-]+)(?:\[[a-z,]+\])?==([^\s;]+)", text, re.MULTILINE))

    dev = versions("dev")
    for name in ("containers", "functions"):
        assert {package: version for package, version in versions(name).items() if dev.get(package) != version} == {}

"""Build the Lambda zips: `<output>/<name>.zip`, the same bytes from every build.

A zip carries `functions/common`, its own `functions/<name>`, `chat/`, and the wheels of requirements/functions.txt
for its target. The Lambda runtime brings boto3.
"""

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from setup import ROOT, run, uv

NAMES = ("authorizer", "conversations", "generations", "messages", "meta", "models")
TARGETS = {"arm64": ("aarch64-manylinux2014", "3.13"), "x86_64": ("x86_64-manylinux2014", "3.13")}
LOCK = ROOT / "requirements" / "functions.txt"
FIXED_TIME = (2020, 1, 1, 0, 0, 0)
LEFT_OUT = {"__pycache__", "tests", "bin", ".lock"}
NOTES_OF_THE_INSTALLER = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}
"""Files of a dist-info folder that depend on the machine that installed it."""

OWN_KINDS = {".py", ".lua"}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target",
        default="local",
        choices=["local", *TARGETS],
        help="local: this machine and Python; arm64 or x86_64: AWS with Python 3.13 (default local)",
    )
    parser.add_argument("--output", type=Path, help="folder of the zips (default build/functions[-local])")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = ROOT / "build" / ("functions-local" if options.target == "local" else "functions")
    return options


def wheels(target: str) -> Path:
    """A folder with the locked packages, installed for the target; made once a lock."""
    digest = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = ROOT / ".cache" / "functions" / f"{target}-{digest}"
    if folder.exists():
        return folder
    print(f"packages of requirements/functions.txt for {target}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=folder.parent))
    command = [str(uv()), "pip", "install", "--quiet", "--target", str(draft), "--require-hashes", "-r", str(LOCK)]
    command += ["--only-binary", ":all:"]
    if target in TARGETS:
        machine, python = TARGETS[target]
        command += ["--python-platform", machine, "--python-version", python]
    else:
        command += ["--python", sys.executable]
    run(*command)
    try:
        draft.rename(folder)
    except OSError:  # another build was quicker
        shutil.rmtree(draft)
    return folder


def own_files(name: str) -> dict[str, bytes]:
    """Path in the zip -> content, of this project's files."""
    found: dict[str, bytes] = {"functions/__init__.py": b""}
    for folder in ("chat", "functions/common", f"functions/{name}"):
        for file in (ROOT / folder).rglob("*"):
            relative = file.relative_to(ROOT)
            if file.suffix in OWN_KINDS and not LEFT_OUT & set(relative.parts):
                found[relative.as_posix()] = file.read_bytes()
    if name == "meta":
        found["functions/meta/openapi.json"] = openapi()
    return found


def package_files(packages: Path) -> dict[str, bytes]:
    """Path in the zip -> content, of the installed packages."""
    found: dict[str, bytes] = {}
    for file in packages.rglob("*"):
        relative = file.relative_to(packages)
        noted = relative.parts[0].endswith(".dist-info") and file.name in NOTES_OF_THE_INSTALLER
        if file.is_file() and not noted and not LEFT_OUT & set(relative.parts):
            found[relative.as_posix()] = file.read_bytes()
    return found


def openapi() -> bytes:
    """The public OpenAPI document as JSON."""
    import json

    sys.path.insert(0, str(ROOT))
    from infra.api.document import public

    return json.dumps(public(), indent=1).encode()


def write(path: Path, files: dict[str, bytes], level: int) -> None:
    """Sorted entries, fixed times and modes."""
    handle, draft = tempfile.mkstemp(prefix="draft-", dir=path.parent)
    with (
        os.fdopen(handle, "wb") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive,
    ):
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, FIXED_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, whatever builds it
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, files[name])
    Path(draft).chmod(0o644)
    Path(draft).replace(path)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    packages = wheels(options.target)
    carried: dict[str, bytes] = {}
    for name in NAMES:
        files = own_files(name)
        digest = hashlib.sha256(packages.name.encode() + Path(__file__).read_bytes())
        for entry in sorted(files):
            digest.update(entry.encode() + b"\0" + hashlib.sha256(files[entry]).digest())
        path, stamp = options.output / f"{name}.zip", options.output / f"{name}.sha256"
        if path.exists() and stamp.exists() and stamp.read_text() == digest.hexdigest():
            continue
        carried = carried or package_files(packages)
        write(path, carried | files, level=1 if options.target == "local" else 9)
        stamp.write_text(digest.hexdigest())
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

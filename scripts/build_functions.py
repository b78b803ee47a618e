"""Build the Lambda zips: `build/functions/<name>.zip`, the same bytes from every build.

A zip carries `functions/common`, its own `functions/<name>`, `chat/`, and the wheels of requirements/functions.txt
for its target. The Lambda runtime brings boto3.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from setup import ROOT, environment, uv

NAMES = ("authorizer", "conversations", "generations", "messages", "meta", "models")
TARGETS = {"arm64": ("aarch64-manylinux2014", "3.13"), "x86_64": ("x86_64-manylinux2014", "3.13")}
LOCK = ROOT / "requirements" / "functions.txt"
FIXED_TIME = (2020, 1, 1, 0, 0, 0)
LEFT_OUT = {"__pycache__", "tests", "bin"}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target",
        default="local",
        choices=["local", *TARGETS],
        help="local: this machine and Python; arm64 or x86_64: AWS with Python 3.13 (default local)",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "functions", help="folder of the zips")
    return parser.parse_args(arguments)


def wheels(target: str) -> Path:
    """A folder with the locked packages, installed for the target; made once a lock."""
    digest = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = ROOT / ".cache" / "functions" / f"{target}-{digest}"
    if folder.exists():
        return folder
    print(f"packages of requirements/functions.txt for {target}", flush=True)
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    command = [str(uv()), "pip", "install", "--quiet", "--target", str(draft), "--require-hashes", "-r", str(LOCK)]
    command += ["--only-binary", ":all:"]
    if target in TARGETS:
        machine, python = TARGETS[target]
        command += ["--python-platform", machine, "--python-version", python]
    else:
        command += ["--python", sys.executable]
    subprocess.run(command, env=environment(), check=True)
    draft.rename(folder)
    return folder


def files_of(name: str, packages: Path) -> dict[str, bytes]:
    """Path in the zip -> content."""
    found: dict[str, bytes] = {}
    for folder in (ROOT / "chat", ROOT / "functions" / "common", ROOT / "functions" / name):
        for file in folder.rglob("*"):
            if file.is_file() and not LEFT_OUT & set(file.parts) and file.name != "Dockerfile":
                found[str(file.relative_to(ROOT))] = file.read_bytes()
    found["functions/__init__.py"] = b""
    for file in packages.rglob("*"):
        relative = file.relative_to(packages)
        if file.is_file() and not LEFT_OUT & set(relative.parts) and file.name != ".lock":
            found[str(relative)] = file.read_bytes()
    if name == "meta":
        found["functions/meta/openapi.json"] = openapi()
    return found


def openapi() -> bytes:
    """The public OpenAPI document as JSON."""
    import json

    sys.path.insert(0, str(ROOT))
    from infra.api.document import public

    return json.dumps(public(), indent=1).encode()


def write(path: Path, files: dict[str, bytes]) -> None:
    """Sorted entries, fixed times and modes."""
    draft = path.with_suffix(".draft")
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, FIXED_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name])
    draft.replace(path)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    packages = wheels(options.target)
    for name in NAMES:
        files = files_of(name, packages)
        digest = hashlib.sha256(options.target.encode())
        for entry in sorted(files):
            digest.update(entry.encode() + b"\0" + files[entry] + b"\0")
        path, stamp = options.output / f"{name}.zip", options.output / f"{name}.sha256"
        if path.exists() and stamp.exists() and stamp.read_text() == digest.hexdigest():
            continue
        write(path, files)
        stamp.write_text(digest.hexdigest())
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

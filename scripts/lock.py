"""Write the hashed locks of requirements/*.in again (`make lock`). They name no index."""

import subprocess
import sys
from pathlib import Path

from setup import ROOT, environment, uv

PYTHON = "3.11"
LOCKS = ("dev", "containers", "functions", "ministack", "vllm")
NOT_FROM_THE_INDEX = ("torch", "torchvision", "torchaudio", "torchcodec")
"""torch comes from PyTorch's CPU index; the index's builds of the others break it (scripts/setup.py)."""


def command(name: str, tool: Path) -> list[str]:
    """One lock; containers and functions take the versions of dev, so that tests run what is deployed."""
    words = [str(tool), "pip", "compile", "--quiet", "--generate-hashes", "--no-emit-index-url", "--no-header"]
    words += ["--python-version", PYTHON, f"{name}.in", "-o", f"{name}.txt"]
    if name in ("containers", "functions"):
        words += ["-c", "dev.txt"]
    if name == "vllm":
        for package in NOT_FROM_THE_INDEX:
            words += ["--no-emit-package", package]
        words += (
            ["--torch-backend", "cpu"]
            if not environment().get("PIP_FIND_LINKS")
            else ["--find-links", environment()["PIP_FIND_LINKS"]]
        )
    else:
        words.append("--universal")
    return words


def main() -> None:
    for name in LOCKS:
        print(f"requirements/{name}.txt", flush=True)
        done = subprocess.run(command(name, uv()), cwd=ROOT / "requirements", env=environment(), check=False)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()

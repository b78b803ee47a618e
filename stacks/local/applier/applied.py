"""What applying the program needs and answers."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Backends:
    """Where the local stand-ins answer."""

    aws_url: str
    valkey_host: str
    valkey_port: int
    state: Path
    """folder for what must survive restarts"""


@dataclass(frozen=True)
class ServiceSpec:
    """A service that AWS would run: its tasks get exactly this environment, and what their platform adds."""

    name: str
    container: str
    environment: dict[str, str]
    count: int


@dataclass(frozen=True)
class Applied:
    """The applied stack."""

    api_url: str
    issuer: str
    audience: str
    user_pool_id: str
    accounts_table: str
    services: list[ServiceSpec]

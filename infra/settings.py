"""The settings of a stack: `stacks/Pulumi.<stack>.yaml` as a frozen, validated structure."""

from typing import Any, Self

import msgspec
import pulumi

from chat.settings import ModelSpec, PlanSpec

NAMESPACE = "chat"
ENGINES = ("simulated", "vllm", "openai")
ARCHITECTURES = ("arm64", "x86_64")


class StackSettingsError(Exception):
    """A key of the stack file is missing, unknown or has a value that is not allowed."""


class StackSettings(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What may differ between environments. A comment says what a change costs or replaces.

    `plans` and `models` are lists of PlanSpec and ModelSpec; counts are numbers of tasks.
    """

    environment: str
    owner: str = "chat-team"
    cost_center: str = "chat"

    models: list[ModelSpec]
    plans: list[PlanSpec]
    system_prompt: str = "You are a helpful assistant."
    context_budget_tokens: int = 6000
    temperature: float = 0.7
    trace_stages: bool = False

    streamers: int = 2
    dispatchers: int = 3
    replicas: int = 1
    small_replicas: int = 0

    engine: str = "openai"
    large_model: str
    small_model: str = ""
    model_path: str = ""
    tokenizer: str = "bytes"
    dtype: str = "bfloat16"
    max_model_len: int = 4096
    openai_base_url: str = ""
    openai_model: str = ""
    openai_api_key: str = ""

    images: dict[str, str] = {}
    """component -> image URI with digest; empty where the platform runs the source"""
    functions_path: str = "build/functions"
    lambda_architecture: str = "arm64"
    lambda_runtime: str = "python3.13"

    cache_tls: bool = True
    """a change replaces the cache: running replies fail over to the reaper"""
    cache_node_type: str = "cache.t4g.small"
    cache_shards: int = 1
    cache_replicas: int = 0
    protect_data: bool = True
    """deletion protection and point-in-time recovery of tables"""
    jwks_base_url: str = ""
    """where the issuer's keys are read; empty: from the issuer itself"""

    @classmethod
    def load(cls) -> Self:
        """From the stack's configuration. Raises StackSettingsError naming key, value and what is allowed."""
        config = pulumi.Config(NAMESPACE)
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            text = config.get(field.encode_name)
            if text is not None:
                values[field.encode_name] = _plain(text, field.type)
        return cls.parse(values)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """From plain values."""
        try:
            settings = msgspec.convert(values, cls, strict=False)
        except msgspec.ValidationError as error:
            raise StackSettingsError(f"stack settings: {error}") from error
        settings.check()
        return settings

    def check(self) -> None:
        """Rules between keys."""
        _one_of("engine", self.engine, ENGINES)
        _one_of("lambdaArchitecture", self.lambda_architecture, ARCHITECTURES)
        ids = [model.id for model in self.models]
        _one_of("largeModel", self.large_model, ids)
        if self.small_replicas:
            _one_of("smallModel", self.small_model, ids)
        for name in ("streamers", "dispatchers", "replicas"):
            if getattr(self, name) < 1:
                raise StackSettingsError(f"{NAMESPACE}:{name} is {getattr(self, name)}; allowed: 1 or more")
        if not self.plans:
            raise StackSettingsError(f"{NAMESPACE}:plans is empty; at least one plan is needed")
        if self.engine == "openai" and not (self.openai_base_url and self.openai_model):
            raise StackSettingsError(f"{NAMESPACE}:engine=openai needs openaiBaseUrl and openaiModel")

    @property
    def pools(self) -> dict[str, tuple[str, int]]:
        """Pool -> its model and number of replicas."""
        pools = {"large": (self.large_model, self.replicas)}
        if self.small_replicas:
            pools["small"] = (self.small_model, self.small_replicas)
        return pools

    @property
    def offered_models(self) -> list[ModelSpec]:
        """The models whose pool exists."""
        return [model for model in self.models if model.pool in self.pools]


def _plain(text: str, kind: Any) -> Any:
    """Structures come as JSON, scalars as text that msgspec converts."""
    if kind in (str, int, float, bool):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _one_of(key: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise StackSettingsError(f"{NAMESPACE}:{key} is {value!r}; allowed: {', '.join(allowed)}")

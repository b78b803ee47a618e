"""The settings of a stack: `stacks/Pulumi.<stack>.yaml` as a frozen, validated structure."""

import json
import re
from collections.abc import Collection
from typing import Any, Self

import msgspec
import pulumi

from chat.settings import ModelSpec, PlanSpec

NAMESPACE = "chat"
ENGINES = ("simulated", "vllm", "openai")
ARCHITECTURES = ("arm64", "x86_64")
POOLS = ("large", "small")
CONTAINERS = ("streamer", "dispatcher", "worker")
ZONES = 3
CACHE_PASSWORD = re.compile(r"[A-Za-z0-9!&#$^<>-]{16,128}")
"""What ElastiCache takes as an AUTH token."""


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

    images: dict[str, str]
    """container -> image URI with digest; the local environment runs the source in its place"""
    functions_path: str = "build/functions"
    """folder of the zips, absolute or from the repository's root"""
    lambda_architecture: str = "arm64"
    lambda_runtime: str = "python3.13"

    nat_gateways: int = 1
    """the tasks' way out, to registries, issuer and provider: about 35 USD a month each; 3 survive a zone's end"""

    cache_tls: bool = True
    """a change replaces the cache: running replies fail over to the reaper"""
    cache_password: str = ""
    """a secret; needed with TLS"""
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
        kinds = {field.encode_name: field.type for field in msgspec.structs.fields(cls)}
        values: dict[str, Any] = {}
        for key in kinds.keys() | _configured():
            text = config.get(key)
            if text is not None:
                values[key] = _plain(text, kinds.get(key, str))
        return cls.parse(values)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """From plain values. Raises StackSettingsError."""
        fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
        for key, value in values.items():
            if key not in fields:
                _refuse(key, value, f"only the keys {', '.join(sorted(fields))}")
            try:
                msgspec.convert(value, fields[key].type, strict=False)
            except msgspec.ValidationError as error:
                _refuse(key, value, str(error))
        for key, field in fields.items():
            if field.required and key not in values:
                raise StackSettingsError(f"{NAMESPACE}:{key} is not set")
        settings = msgspec.convert(values, cls, strict=False)
        settings.check()
        return settings

    def check(self) -> None:
        """Rules of values and between keys. Raises StackSettingsError."""
        _one_of("engine", self.engine, ENGINES)
        _one_of("lambdaArchitecture", self.lambda_architecture, ARCHITECTURES)
        for key, value, least in (
            ("streamers", self.streamers, 1),
            ("dispatchers", self.dispatchers, 1),
            ("replicas", self.replicas, 1),
            ("smallReplicas", self.small_replicas, 0),
            ("natGateways", self.nat_gateways, 1),
            ("cacheShards", self.cache_shards, 1),
            ("cacheReplicas", self.cache_replicas, 0),
        ):
            if value < least:
                _refuse(key, value, f"{least} or more")
        if self.nat_gateways > ZONES:
            _refuse("natGateways", self.nat_gateways, f"{ZONES} or fewer, one a zone")
        if self.engine == "openai" and not (self.openai_base_url and self.openai_model):
            raise StackSettingsError(f"{NAMESPACE}:engine=openai needs openaiBaseUrl and openaiModel")
        for container in CONTAINERS:
            if not self.images.get(container):
                _refuse("images", self.images, f"an image for each of {', '.join(CONTAINERS)}")
        self._check_catalogue()
        self._check_cache()

    def _check_catalogue(self) -> None:
        plans = [plan.name for plan in self.plans]
        if not plans or len(set(plans)) != len(plans):
            _refuse("plans", plans, "one or more, each name once")
        pool_of = {model.id: model.pool for model in self.models}
        if len(pool_of) != len(self.models):
            _refuse("models", [model.id for model in self.models], "each id once")
        for model in self.models:
            _one_of(f"models[{model.id}].pool", model.pool, POOLS)
            for plan in model.plans:
                _one_of(f"models[{model.id}].plans", plan, plans)
        _one_of("largeModel", self.large_model, [ident for ident, pool in pool_of.items() if pool == "large"])
        if self.small_replicas:
            _one_of("smallModel", self.small_model, [ident for ident, pool in pool_of.items() if pool == "small"])

    def _check_cache(self) -> None:
        if self.cache_tls and not CACHE_PASSWORD.fullmatch(self.cache_password):
            raise StackSettingsError(
                f"{NAMESPACE}:cachePassword has {len(self.cache_password)} characters; allowed: 16 to 128 of letters, "
                "digits and !&#$^<>- (`pulumi config set --secret chat:cachePassword`)"
            )
        if self.cache_password and not self.cache_tls:
            raise StackSettingsError(f"{NAMESPACE}:cachePassword is set; allowed: only with cacheTls: true")

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


def _configured() -> set[str]:
    """The keys that the stack file has, also those that nobody knows."""
    # The public Config answers only keys that it is asked for, and a typing error must not pass silently.
    from pulumi.runtime import config

    found = config.CONFIG.get() | config.get_config_env()
    return {key.removeprefix(f"{NAMESPACE}:") for key in found if key.startswith(f"{NAMESPACE}:")}


def _one_of(key: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        _refuse(key, value, ", ".join(allowed))


def _refuse(key: str, value: Any, allowed: str) -> None:
    shown = "(hidden)" if key.endswith(("Password", "ApiKey")) else json.dumps(value, default=str)[:200]
    raise StackSettingsError(f"{NAMESPACE}:{key} is {shown}; allowed: {allowed}")

"""The environment contract: the infrastructure program writes exactly these variables, the runtimes read them.

A field `table_name` is the variable `TABLE_NAME`. Lists and structures are JSON. `environment_names` is what
the infrastructure program checks its declarations against, so the two cannot drift.
"""

import os
from collections.abc import Mapping
from typing import Any, Self

import msgspec


class SettingsError(Exception):
    """A variable is missing or malformed; the message names it and what is allowed."""


class ModelSpec(msgspec.Struct, frozen=True, rename="camel"):
    """A model that users may ask for.

    `pool` is the pool of replicas that serves it, `context_tokens` prompt and reply together, `plans` who may
    ask for it, `usd_per_million_*` its price (for own GPUs the equivalent).
    """

    id: str
    pool: str
    context_tokens: int
    plans: list[str]
    usd_per_million_input: float
    usd_per_million_output: float
    description: str = ""


class PlanSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a plan allows. `priority`: lower is served first. `reply_cap` bounds `maxTokens`, in tokens."""

    name: str
    priority: int
    reply_cap: int
    default_reply_tokens: int = 2000
    concurrent_replies: int = 2


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every runtime's settings."""

    @classmethod
    def environment_names(cls) -> dict[str, bool]:
        """Variable name -> whether it is required. Fields of the platform are not declared by a task."""
        return {
            field.name.upper(): field.required
            for field in msgspec.structs.fields(cls)
            if field.name not in PLATFORM_FIELDS
        }

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read and check the environment. Raises SettingsError naming every variable at fault."""
        source = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        faults = []
        for field in msgspec.structs.fields(cls):
            text = source.get(field.name.upper())
            if text is None:
                if field.required:
                    faults.append(f"{field.name.upper()} is not set")
                continue
            try:
                values[field.name] = _parse(text, field.type)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                faults.append(f"{field.name.upper()}={text[:80]!r}: {error}")
        if faults:
            raise SettingsError(f"{cls.__name__}: " + "; ".join(faults))
        return cls(**values)


PLATFORM_FIELDS = frozenset({"host", "port", "replica_name"})
"""Given by whatever runs the process (ECS, SageMaker, the local supervisor), not by the task definition."""


def _parse(text: str, kind: Any) -> Any:
    if kind in (str, int, float, bool):
        return msgspec.convert(text, kind, strict=False)
    return msgspec.json.decode(text, type=kind)


class StoreSettings(Settings, frozen=True, kw_only=True):
    """DynamoDB, S3 and Valkey. `valkey_url` is `redis://` or `rediss://host:port`, always cluster mode."""

    environment: str
    conversations_table: str
    generations_table: str
    accounts_table: str
    ledger_table: str
    content_bucket: str
    valkey_url: str
    valkey_password: str = ""
    trace_stages: bool = False


class AuthorizerSettings(Settings, frozen=True, kw_only=True):
    """The Lambda authorizer: who signs users in. `jwks_url` is where the issuer publishes its keys."""

    oidc_issuer: str
    oidc_audience: str
    jwks_url: str


class FunctionSettings(StoreSettings, frozen=True, kw_only=True):
    """The Lambdas behind the API."""

    models: list[ModelSpec]
    plans: list[PlanSpec]
    page_limit: int = 100


class StreamerSettings(StoreSettings, frozen=True, kw_only=True):
    """The streamer. `tokenizer` is a directory with tokenizer.json, or `bytes` (3 bytes a token)."""

    oidc_issuer: str
    oidc_audience: str
    jwks_url: str
    models: list[ModelSpec]
    plans: list[PlanSpec]
    tokenizer: str = "bytes"
    system_prompt: str = "You are a helpful assistant."
    context_budget_tokens: int = 6000
    temperature: float = 0.7
    heartbeat_seconds: float = 8.0
    drain_seconds: float = 90.0
    max_connections: int = 4000
    host: str = "0.0.0.0"
    port: int = 8080


class DispatcherSettings(StoreSettings, frozen=True, kw_only=True):
    """The dispatcher. `silent_seconds`: a replica without a heartbeat for this long is dead."""

    models: list[ModelSpec]
    plans: list[PlanSpec]
    pools: list[str]
    silent_seconds: float = 3.0
    max_attempts: int = 3
    abandoned_seconds: float = 30.0
    host: str = "0.0.0.0"
    port: int = 8080


class WorkerSettings(StoreSettings, frozen=True, kw_only=True):
    """One replica. `engine` is simulated, vllm or openai.

    The `simulated_*` numbers are the reference replica (70B on 4 x H100): `step = base + per_sequence * batch`
    gives 18 ms alone and 36 ms at 183; prefill 0.14 s per 1,000 tokens; 458,000 tokens of KV cache.
    `tensor_parallel_size`: over how many GPUs vLLM spreads the model (4 for 70B on H100).
    """

    models: list[ModelSpec]
    plans: list[PlanSpec]
    pool: str
    engine: str
    model: str
    model_path: str = ""
    dtype: str = "bfloat16"
    max_model_len: int = 4096
    tensor_parallel_size: int = 1
    flush_seconds: float = 0.25
    heartbeat_seconds: float = 0.5
    drain_seconds: float = 20.0
    openai_base_url: str = ""
    openai_api_key: str = ""
    openai_model: str = ""
    openai_concurrency: int = 32
    simulated_kv_tokens: int = 458_000
    simulated_step_base_seconds: float = 0.0179
    simulated_step_per_sequence_seconds: float = 0.0000989
    simulated_prefill_seconds_per_token: float = 0.00014
    host: str = "0.0.0.0"
    port: int = 8080
    replica_name: str = "replica"

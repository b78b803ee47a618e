"""The architecture on one screen."""

from typing import Any

import pulumi
import pulumi_aws as aws

from chat.settings import (
    AuthorizerSettings,
    DispatcherSettings,
    FunctionSettings,
    StreamerSettings,
    WorkerSettings,
)
from infra.components.api import Api
from infra.components.balancer import Balancer
from infra.components.cache import Cache
from infra.components.data import Access, Data
from infra.components.functions import Function
from infra.components.identity import Identity
from infra.components.network import Network
from infra.components.secret import Secret
from infra.components.services import Service
from infra.environment import environment, readable
from infra.settings import StackSettings
from infra.tags import Component, tags

FINISHES_TURNS = dict.fromkeys(("conversations", "generations", "accounts", "ledger", "contents"), Access.WRITE)
"""What ending a reply touches; whoever may cancel one, may have to end it."""

STORE_FUNCTIONS: dict[str, dict[str, Access]] = {
    "conversations": FINISHES_TURNS,
    "generations": FINISHES_TURNS,
    "messages": {"conversations": Access.READ, "contents": Access.READ},
    "models": {"accounts": Access.READ},
}


def deploy(settings: StackSettings) -> None:
    """Declare everything."""
    region = aws.get_region().region
    network = Network("network", settings, region)
    identity = Identity("identity", settings)
    data = Data("data", settings)
    cache = Cache("cache", settings, network)
    balancer = Balancer("streamers", settings, network)

    shared = {
        "environment": settings.environment,
        "valkey_url": cache.url,
        "valkey_password": cache.password,
        "models": settings.offered_models,
        "plans": settings.plans,
        "trace_stages": settings.trace_stages,
        "oidc_issuer": identity.issuer,
        "oidc_audience": identity.audience,
        "jwks_url": identity.jwks_url,
    }
    functions = _functions(settings, network, data, shared)
    _services(settings, network, data, balancer, region, shared)
    api = Api("api", settings, region, functions, balancer)

    pulumi.export("apiUrl", api.url)
    pulumi.export("issuer", identity.issuer)
    pulumi.export("audience", identity.audience)
    pulumi.export("userPoolId", identity.pool.id)
    pulumi.export("accountsTable", data.accounts.name)


def _functions(settings: StackSettings, network: Network, data: Data, shared: dict[str, Any]) -> dict[str, Function]:
    vpc = {"subnet_ids": [subnet.id for subnet in network.subnets], "security_group_ids": [network.tasks.id]}

    made = {}
    for name, access in STORE_FUNCTIONS.items():
        link = data.link(**access)
        variables = environment(FunctionSettings, readable(FunctionSettings, shared | link.values))
        made[name] = Function(name, settings, environment=variables, statements=link.statements, vpc=vpc)
    authorizer = environment(AuthorizerSettings, readable(AuthorizerSettings, shared))
    made["authorizer"] = Function("authorizer", settings, environment=authorizer, statements=[], vpc=None)
    made["meta"] = Function("meta", settings, environment={}, statements=[], vpc=None)
    return made


def _services(
    settings: StackSettings,
    network: Network,
    data: Data,
    balancer: Balancer,
    region: str,
    shared: dict[str, Any],
) -> None:
    cluster = aws.ecs.Cluster(
        "chat",
        settings=[{"name": "containerInsights", "value": "enabled"}],
        tags=tags(settings, Component.STREAMING),
    )
    link = data.link(**FINISHES_TURNS)
    shared = shared | link.values
    common = {"cluster": cluster, "network": network, "region": region, "statements": link.statements}
    streamer = readable(StreamerSettings, shared) | {
        "tokenizer": settings.tokenizer,
        "system_prompt": settings.system_prompt,
        "context_budget_tokens": settings.context_budget_tokens,
        "temperature": settings.temperature,
    }
    Service(
        "streamer",
        settings,
        container="streamer",
        component=Component.STREAMING,
        count=settings.streamers,
        environment=environment(StreamerSettings, streamer),
        balancer=balancer,
        **common,
    )
    dispatcher = readable(DispatcherSettings, shared) | {"pools": list(settings.pools)}
    Service(
        "dispatcher",
        settings,
        container="dispatcher",
        component=Component.SCHEDULING,
        count=settings.dispatchers,
        environment=environment(DispatcherSettings, dispatcher),
        **common,
    )
    key = settings.openai_api_key
    provider_key = Secret("provider-key", settings, key, Component.MODELS) if key else None
    for pool, (model, replicas) in settings.pools.items():
        worker = readable(WorkerSettings, shared) | _worker(settings, pool, model, provider_key)
        Service(
            f"worker-{pool}",
            settings,
            container="worker",
            component=Component.MODELS,
            count=replicas,
            environment=environment(WorkerSettings, worker),
            **common,
        )


def _worker(settings: StackSettings, pool: str, model: str, provider_key: Secret | None) -> dict[str, Any]:
    return {
        "pool": pool,
        "model": model,
        "engine": settings.engine,
        "model_path": settings.model_path,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "openai_base_url": settings.openai_base_url or None,
        "openai_model": settings.openai_model or None,
        "openai_api_key": provider_key,
    }

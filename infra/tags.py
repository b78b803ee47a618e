"""The vocabulary of cost-allocation tags: every taggable resource carries all of them."""

from enum import StrEnum

from infra.settings import StackSettings


class Component(StrEnum):
    """Which part of the service a resource belongs to; finance groups by it."""

    API = "api"
    """Gateway, functions, edge: what answers plain requests."""
    STREAMING = "streaming"
    """Streamers and their load balancer; not the models."""
    SCHEDULING = "scheduling"
    """Dispatchers."""
    MODELS = "models"
    """Workers, GPUs and provider calls."""
    DATA = "data"
    """Tables, buckets, cache."""
    IDENTITY = "identity"
    """Sign-in."""
    NETWORK = "network"
    """What all others share."""


def tags(settings: StackSettings, component: Component) -> dict[str, str]:
    """All cost tags of a resource."""
    return {
        "Service": "llm-chat",
        "Environment": settings.environment,
        "Component": str(component),
        "Owner": settings.owner,
        "CostCenter": settings.cost_center,
    }

"""Applies the Pulumi program to the local stand-ins: the deployment engine of `make up`."""

from stacks.local.applier.applied import Applied, Backends, ServiceSpec
from stacks.local.applier.apply import apply

__all__ = ["Applied", "Backends", "ServiceSpec", "apply"]

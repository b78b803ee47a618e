"""Valkey in cluster mode: the token buffer, live wake-ups, lanes and replicas."""

from chat.adapters.valkey.buffer import ValkeyTokenBuffer
from chat.adapters.valkey.client import Valkey, connect
from chat.adapters.valkey.lanes import ValkeyLanes
from chat.adapters.valkey.wakeups import ValkeyWakeups

__all__ = ["Valkey", "ValkeyLanes", "ValkeyTokenBuffer", "ValkeyWakeups", "connect"]

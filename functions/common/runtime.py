"""What the functions behind the API share, made once a process and only when it is used."""

from functools import cache

from chat.adapters import dynamo
from chat.adapters.dynamo import Stores
from chat.adapters.valkey import Valkey, ValkeyLanes, ValkeyTokenBuffer, connect
from chat.catalogue import Catalogue
from chat.settings import FunctionSettings
from chat.usecases.cancel import CancelGeneration
from chat.usecases.finish_turn import FinishTurn


@cache
def settings() -> FunctionSettings:
    """Checked at the first use; a fault names the variable."""
    return FunctionSettings.load()


@cache
def stores() -> Stores:
    """DynamoDB and S3."""
    return dynamo.connect_blocking(settings())


@cache
def valkey() -> Valkey:
    """Connects at the first command."""
    return connect(settings().valkey_url, settings().valkey_password)


@cache
def catalogue() -> Catalogue:
    """Models and plans."""
    return Catalogue(settings().models, settings().plans)


@cache
def buffer() -> ValkeyTokenBuffer:
    """The token buffer."""
    return ValkeyTokenBuffer(valkey())


@cache
def lanes() -> ValkeyLanes:
    """The lanes."""
    return ValkeyLanes(valkey(), settings().plans)


@cache
def cancel() -> CancelGeneration:
    """The use case that two functions need."""
    finish = FinishTurn(buffer(), stores().generations, lanes(), catalogue())
    return CancelGeneration(buffer(), stores().generations, lanes(), finish)

"""What the use cases need from the outside, as protocols. Adapters implement them; tests use in-memory ones.

Every method raises `chat.errors.Unavailable` when its store does not answer within the adapter's deadline.
"""

from chat.ports.buffer import (
    BufferEntry,
    Claim,
    Fenced,
    LiveState,
    Subscription,
    TokenBuffer,
    UnknownGeneration,
    Wakeups,
)
from chat.ports.engines import Detokenizer, Engine, EngineOutput, EngineStatus, TokenCounter
from chat.ports.identity import Identity, TokenVerifier
from chat.ports.lanes import Assignment, JobState, Lanes, PoolStatus, QueuePlace, ReplicaStatus, Swept
from chat.ports.stores import (
    Account,
    AccountStore,
    BeginStatus,
    ConversationStore,
    GenerationStore,
    NewTurn,
    OpenedConversation,
    Send,
)

__all__ = [
    "Account",
    "AccountStore",
    "Assignment",
    "BeginStatus",
    "BufferEntry",
    "Claim",
    "ConversationStore",
    "Detokenizer",
    "Engine",
    "EngineOutput",
    "EngineStatus",
    "Fenced",
    "GenerationStore",
    "Identity",
    "JobState",
    "Lanes",
    "LiveState",
    "NewTurn",
    "OpenedConversation",
    "PoolStatus",
    "QueuePlace",
    "ReplicaStatus",
    "Send",
    "Subscription",
    "Swept",
    "TokenBuffer",
    "TokenCounter",
    "TokenVerifier",
    "UnknownGeneration",
    "Wakeups",
]

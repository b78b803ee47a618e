"""Model engines, chosen by the setting `engine`: simulated, vllm or openai."""

from chat.ports import Engine
from chat.settings import SettingsError, WorkerSettings


def make_engine(settings: WorkerSettings) -> Engine:
    """The engine that the settings name; imports only what that one needs. Raises SettingsError."""
    if settings.engine == "simulated":
        from chat.adapters.engines.simulated import SimulatedEngine

        return SimulatedEngine(
            settings.simulated_kv_tokens,
            settings.simulated_step_base_seconds,
            settings.simulated_step_per_sequence_seconds,
            settings.simulated_prefill_seconds_per_token,
        )
    if settings.engine == "vllm":
        from chat.adapters.engines.vllm import VllmEngine

        return VllmEngine(
            settings.model_path,
            settings.dtype,
            settings.max_model_len,
            tensor_parallel_size=settings.tensor_parallel_size,
        )
    if settings.engine == "openai":
        from chat.adapters.engines.openai import OpenAIEngine

        if not settings.openai_base_url or not settings.openai_model:
            raise SettingsError("ENGINE=openai needs OPENAI_BASE_URL and OPENAI_MODEL")
        context = next((model.context_tokens for model in settings.models if model.id == settings.model), 8192)
        return OpenAIEngine(
            settings.openai_base_url,
            settings.openai_api_key,
            settings.openai_model,
            settings.openai_concurrency,
            context,
        )
    raise SettingsError(f"ENGINE={settings.engine!r}: allowed are simulated, vllm, openai")

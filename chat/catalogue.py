"""Models and plans: who may ask for what, at which price."""

from collections.abc import Sequence

from chat.errors import InvalidRequest
from chat.model import Cost, ServedBy, Usage
from chat.settings import ModelSpec, PlanSpec


class Catalogue:
    """The models and plans of a deployment, by name."""

    def __init__(self, models: Sequence[ModelSpec], plans: Sequence[PlanSpec]) -> None:
        self._models = {model.id: model for model in models}
        self._plans = {plan.name: plan for plan in plans}

    def plan(self, name: str) -> PlanSpec:
        """A plan that is no longer offered counts as the lowest one (the last served)."""
        found = self._plans.get(name)
        return found or max(self._plans.values(), key=lambda plan: plan.priority)

    def model(self, model_id: str) -> ModelSpec | None:
        """The model, whoever may ask for it."""
        return self._models.get(model_id)

    def allowed(self, plan: PlanSpec) -> list[ModelSpec]:
        """What a plan may ask for, in the order of the settings."""
        return [model for model in self._models.values() if plan.name in model.plans]

    def check(self, asked: str | None, plan: PlanSpec) -> None:
        """Raises InvalidRequest(param=model) for a model that is unknown or not part of the plan."""
        names = [model.id for model in self.allowed(plan)]
        if asked is not None and asked not in names:
            raise InvalidRequest(f"model must be one of: {', '.join(names)}.", param="model")

    def choose(self, asked: str | None, preferred: str | None, plan: PlanSpec) -> ModelSpec:
        """The model asked for; else the conversation's, if the plan still has it; else the plan's first large one."""
        self.check(asked, plan)
        allowed = self.allowed(plan)
        if not allowed:
            raise InvalidRequest("Your plan has no models.", param="model")
        by_id = {model.id: model for model in allowed}
        named = by_id.get(asked or "") or by_id.get(preferred or "")
        return named or next((model for model in allowed if model.pool == ServedBy.LARGE), allowed[0])

    def reply_tokens(self, asked: int | None, plan: PlanSpec) -> int:
        """The reply cap of one send. Raises InvalidRequest(param=maxTokens) above the plan's."""
        if asked is None:
            return min(plan.default_reply_tokens, plan.reply_cap)
        if asked > plan.reply_cap:
            raise InvalidRequest(f"maxTokens must be from 1 to {plan.reply_cap} on your plan.", param="maxTokens")
        return asked

    def cost(self, model_id: str, usage: Usage) -> Cost:
        """Tokens times the model's prices; tokens found in the prefix cache cost what input costs."""
        model = self._models.get(model_id)
        if model is None:
            return Cost()
        paid_in = usage.input_tokens * model.usd_per_million_input
        paid_out = usage.output_tokens * model.usd_per_million_output
        return Cost(round((paid_in + paid_out) / 1e6, 10))

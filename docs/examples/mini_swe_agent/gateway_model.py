"""The policy as a model class of mini-swe-agent (``--model-class``), without LiteLLM, whose import takes seconds."""

import os
from typing import Any, ClassVar

import requests
from minisweagent.models.requesty_model import BASH_TOOL, RequestyModel


class GatewayModel(RequestyModel):
    """A model that is asked at ``OPENAI_BASE_URL``."""

    # each request is a new sample, and a context that is full stays full
    abort_exceptions: ClassVar = [*RequestyModel.abort_exceptions, requests.RequestException]

    def _query(self, messages: list[dict[str, Any]], **_: Any) -> Any:
        answer = requests.post(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json={"model": self.config.model_name, "messages": messages, "tools": [BASH_TOOL]},
            headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
            timeout=1800,
        )
        answer.raise_for_status()
        return answer.json()

    def _calculate_cost(self, response: dict[str, Any]) -> dict[str, float]:
        return {"cost": 0.0}

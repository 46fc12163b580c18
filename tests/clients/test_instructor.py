"""instructor: replies are of a type, by a call that must be made and by a schema."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pydantic
import pytest

from hiserve.models.model_config import NANO
from tests.e2e.live import Live

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
QUESTION = "A small latte for two, please."


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")  # else the model may go on with fields of its own
    drink: Literal["latte", "mocha", "tea"]
    size: Literal["small", "large"]


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_structured_output_of_instructor(live: Live, mode: str) -> None:
    import instructor

    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0), mode=instructor.Mode[mode]
    )
    messages: Any = [{"role": "user", "content": QUESTION}]
    order = client.create(model=NANO, response_model=Order, messages=messages, max_retries=0, max_tokens=512)
    assert isinstance(order, Order)

"""openai-agents with its default model class, which asks ``/v1/responses``: an agent calls a tool and answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hiserve.core.plan import Int32Array
from tests.e2e.live import serve
from tests.helpers.snippets import NEEDS_AGENTS, SHOWN, of_agents
from tests.unit.server.conftest import TOKENIZER
from tests.unit.server.tool_replies import SOURCE, Trusting, client_of, script, serving

pytestmark = pytest.mark.clients
CALL = '<think>\nHm.\n</think>\n\nNow.\n<tool_call>\n{"name": "look", "arguments": {"where":   "Oslo"}}\n</tool_call>'


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
async def test_an_agent_calls_a_tool_and_each_step_begins_with_the_tokens_of_the_last(
    is_stream: bool, is_stored: bool
) -> None:
    import agents

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def look(where: str) -> str:
        """Looks at a place.

        Args:
            where: The place.
        """
        return f"rain in {where}"

    def reply(prompt: Int32Array) -> list[list[int]]:
        has_result = "rain in Oslo" in TOKENIZER.decode(prompt, skip_hidden=False)
        return script("It rains." if has_result else CALL, 2)

    async with serving("", template=SOURCE, vetting=Trusting()) as server, client_of(server) as client:
        server.engine.script = reply
        settings = agents.ModelSettings(store=is_stored, response_include=["reasoning.encrypted_content"])
        model = agents.OpenAIResponsesModel(model="tiny", openai_client=client)
        agent = agents.Agent(name="a", instructions="Be short.", model=model, tools=[look], model_settings=settings)
        options: dict[str, Any] = {"auto_previous_response_id": True} if is_stored else {}
        if is_stream:
            run = agents.Runner.run_streamed(agent, "How is Oslo?", **options)
            async for _ in run.stream_events():
                pass
            output = run.final_output
        else:
            output = (await agents.Runner.run(agent, "How is Oslo?", **options)).final_output
        first, second = server.engine.seen
    assert output == "It rains."
    ids = [index for delta in script(CALL, 1) for index in delta]
    assert second.prompt.tolist()[: len(first.prompt) + len(ids)] == [*first.prompt.tolist(), *ids]


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = [text for text in of_agents("python") if NEEDS_AGENTS in text]
    with serve(tmp_path, "--cpu-threads", "1") as live:
        program = program.replace(SHOWN, live.url)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert live.counter("hiserve:request_success_total") >= 1
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()

"""The offline engine."""

from hiserve.llm import offline_backends
from tests.e2e import test_llm

with offline_backends.InProcess._take, test_llm.test_a_request_that_fails_ends_alone:
    "LLM: one failed request ends the batch"
    job.fail(EngineError(f"the request failed: {message}"))
    raise EngineError(f"the request failed: {message}")

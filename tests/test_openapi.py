"""The server against its own description: schemathesis makes up requests, good and bad."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

import solodg
from solodg.serving.app import build_app
from solodg.serving.settings import ServerSettings

GOOD, BAD = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def api(digits_onnx):
    app = build_app(solodg.load(digits_onnx), "test", ServerSettings())
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    app.state.service.close()


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [
        ("/predict", "POST", GOOD),
        ("/predict", "POST", BAD),
        ("/explain", "POST", GOOD),
        ("/model", "GET", GOOD),
        ("/health", "GET", GOOD),
        ("/metrics", "GET", GOOD),
    ],
)
def test_every_answer_is_as_described(api, path, method, mode) -> None:
    operation = api[path][method]
    answered = []

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case) -> None:
        # A description cannot say which bytes are an image: most of the good are rightly refused.
        answer = case.call_and_validate(excluded_checks=[positive_data_acceptance])
        answered.append(answer.status_code)

    check()
    assert answered
    assert max(answered) < 500


def test_everything_is_described(api) -> None:
    described = {(o.ok().path, o.ok().method.upper()) for o in api.get_all_operations()}
    assert described == {
        ("/predict", "POST"), ("/explain", "POST"), ("/model", "GET"), ("/health", "GET"),
        ("/metrics", "GET"),
    }  # fmt: skip

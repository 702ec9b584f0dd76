"""A head takes over the API server's name of a request, and names the methods of a path."""

from pathlib import Path

import orjson

from tinkercloud_api.routes.sessions.traces import trace_of
from tinkercloud_protocol.heads.request_timeline import Timeline
from tinkercloud_protocol.wire import request_ids, routes
from tinkercloud_testing.serving.served_heads import TOKEN, a_served_head


async def test_a_request_has_its_name_in_the_trace_of_its_session(tmp_path: Path) -> None:
    body = {"model": "m", "prompt": "hi", "max_tokens": 1}
    async with a_served_head(tmp_path) as head:
        await head.sampler("s:sample:0")
        sent = orjson.dumps(body)
        named = {request_ids.HEADER: "req_1"}
        await head.send(routes.OPENAI_COMPLETIONS, sent, "s:sample:0", **named)
        await head.send(routes.OPENAI_COMPLETIONS, sent, "s:sample:0")
        answer = await head.send(f"{routes.HEAD_TIMELINE}/s", b"", "", method="GET")

    spans = Timeline.model_validate_json(answer.body).spans
    events = orjson.loads(trace_of(spans))["traceEvents"]
    assert [span.request for span in spans] == ["req_1", None]
    assert {"request_id": "req_1"} in [event.get("args") for event in events]


async def test_a_wrong_method_at_a_head_is_405(tmp_path: Path) -> None:
    async with a_served_head(tmp_path) as head:
        headers = {routes.HEAD_TOKEN_HEADER: TOKEN}
        for method, path, allowed in (
            ("GET", routes.ASAMPLE, "POST"),
            ("POST", routes.HEAD_STATUS, "GET"),
            ("PATCH", f"{routes.HEAD_MODELS}/m", "DELETE, PUT"),
        ):
            async with head.client.request(method, head.url + path, headers=headers) as answer:
                assert (answer.status, answer.headers["allow"]) == (405, allowed)
        unknown = await head.send("/unknown", b"", "", method="GET")

    assert unknown.status == 404

"""Invalid ids, JSON and pages."""

import gzip

from tinkercloud_testing.clients.raw_run import Run


def test_malformed_ids_are_those_of_no_object(run: Run) -> None:
    assert run.server.post("retrieve_future", {"request_id": ""}).status == 400
    for request_id in ("x", "a:train:0", "a:train:x:1", "../:train:0:1", "a:b:0:1"):
        assert run.server.post("retrieve_future", {"request_id": request_id}).status == 404


def test_invalid_json_is_rejected(run: Run) -> None:
    nested = b"[" * 100_000
    for path in ("create_model", "optim_step", "asample", "create_session", "retrieve_future"):
        # A session needs no field, and no body.
        empty = () if path == "create_session" else (b"",)
        for body in (*empty, b"{", b"[]", b"null", b'"x"', nested):
            answer = run.server.request("POST", f"/api/v1/{path}", body)

            assert answer.status == 400, (path, body[:10], answer.body)


def test_a_large_json_body_is_rejected(run: Run) -> None:
    body = b'{"sdk_version": "' + b"x" * (2 << 20) + b'"}'

    assert run.server.request("POST", "/api/v1/create_session", body).status == 413


def test_lists_reject_invalid_pages(run: Run) -> None:
    absurd = ("limit=0", "limit=100000", "offset=-1", f"offset={1 << 63}", "limit=x")
    for listed in ("training_runs", "checkpoints", "sessions"):
        for query in (*absurd, "access_scope=all"):
            assert run.server.request("GET", f"/api/v1/{listed}?{query}").status == 400


def test_unsupported_calls_are_named(run: Run) -> None:
    answers = {
        "GET /api/v1/a_listing_of_next_year": 404,
        "POST /api/v1/a_call_of_next_year": 404,
        "GET /api/v1/optim_step": 405,
        "POST /api/v1/training_runs": 405,
        "DELETE /api/v1/create_session": 405,
    }

    for what, status in answers.items():
        method, path = what.split()
        answer = run.server.request(method, path)

        assert answer.status == status
        assert f"{what} is not supported by this server" in answer.detail
        assert (answer.headers.get("allow") is not None) == (status == 405)


def test_a_character_that_databases_cannot_store_is_rejected_by_name(run: Run) -> None:
    text = "a\0b"
    answers = [
        run.server.post("create_session", {"sdk_version": "t", "display_name": text}),
        run.server.post("session_heartbeat", {"session_id": text}),
        run.server.post("get_info", {"model_id": text}),
        run.server.request("GET", "/api/v1/sessions/a%00b"),
        run.server.request("GET", "/api/v1/training_runs/a%00b"),
    ]

    for answer in answers:
        assert answer.status == 400
        assert "U+0000" in answer.detail
    assert [answer.detail.partition(":")[0] for answer in answers[:3]] == [
        "display_name",
        "session_id",
        "model_id",
    ]


def test_compressed_json_is_rejected_by_name(run: Run) -> None:
    body = gzip.compress(b'{"sdk_version": "t"}')
    for path in ("create_session", "optim_step", "asample", "retrieve_future"):
        headers = {"Content-Encoding": "gzip"}
        answer = run.server.request("POST", f"/api/v1/{path}", body, headers=headers)

        assert answer.status == 400
        assert answer.detail == "Content-Encoding: 'gzip' is not supported; use none"


def test_a_body_that_is_not_json_is_rejected_with_the_reason(run: Run) -> None:
    reasons = {
        b"[" * 100_000: "nested too deeply",
        b'{"sdk_version": "\xff"}': "not UTF-8",
    }

    for body, reason in reasons.items():
        answer = run.server.request("POST", "/api/v1/create_session", body)

        assert answer.status == 400
        assert reason in answer.detail

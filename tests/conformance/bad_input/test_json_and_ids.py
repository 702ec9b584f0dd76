"""Ids, JSON and pages that are none."""

from tinkercloud_testing.raw_run import Run


def test_malformed_ids_are_refused(run: Run) -> None:
    for request_id in ("", "x", "a:train:0", "a:train:x:1", "../:train:0:1", "a:b:0:1"):
        assert run.server.post("retrieve_future", {"request_id": request_id}).status == 400


def test_json_that_is_none_is_refused(run: Run) -> None:
    nested = b"[" * 100_000
    for path in ("create_model", "optim_step", "asample", "create_session", "retrieve_future"):
        for body in (b"", b"{", b"[]", b"null", b'"x"', nested):
            answer = run.server.request("POST", f"/api/v1/{path}", body)

            assert answer.status == 400, (path, body[:10], answer.body)


def test_a_large_json_body_is_refused(run: Run) -> None:
    body = b'{"sdk_version": "' + b"x" * (2 << 20) + b'"}'

    assert run.server.request("POST", "/api/v1/create_session", body).status == 413


def test_lists_refuse_absurd_pages(run: Run) -> None:
    for query in ("limit=0", "limit=100000", "offset=-1", "limit=x", "access_scope=all"):
        assert run.server.request("GET", f"/api/v1/training_runs?{query}").status == 400

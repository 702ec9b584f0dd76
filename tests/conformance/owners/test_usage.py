"""Usage of owners is counted exactly, and survives restarts of server and head."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import tinker
from tinker import types

from tinkercloud_api.config.readable import moment
from tinkercloud_testing.clients.sdk_steps import a_datum, score, step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, TRAINERS, Server, a_server

MODEL = "tiny/llama"
PROMPT = [5, 6, 7, 8, 9]
DATUM_TOKENS = 4
AMOUNTS = ("trained_tokens", "forward_tokens", "prefill_tokens", "cached_tokens", "sampled_tokens")


@pytest.fixture(scope="module")
def own_server(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, trainer: str
) -> Iterator[Server]:
    """Run a server whose usage no other test changes."""
    state_dir = tmp_path_factory.mktemp("state")
    prices = {"currency": "EUR", "models": {MODEL: {"train": 10**6, "sample": 2 * 10**6}}}
    settings = {**TRAINERS[trainer], "TINKERCLOUD_PRICES": json.dumps(prices)}
    with a_server(state_dir, {MODEL: model_folder}, settings) as running:
        yield running


@pytest.fixture(scope="module")
def ann(own_server: Server) -> str:
    """Return the key of an owner."""
    return own_server.new_key("ann")


@pytest.fixture(scope="module")
def bob(own_server: Server) -> str:
    """Return the key of another owner."""
    return own_server.new_key("bob")


def usage_of(server: Server, key: str, **query: str) -> list[dict[str, Any]]:
    """Return the rows of an owner's usage."""
    answer = server.request("GET", f"/api/v1/usage?{urlencode(query)}", key=key).json()
    rows: list[dict[str, Any]] = answer["usage"]
    return rows


def total(rows: Sequence[dict[str, Any]]) -> Counter[str]:
    """Return the sums of the tokens of rows."""
    return +Counter({name: sum(row[name] for row in rows) for name in AMOUNTS})


def await_usage(server: Server, key: str, expected: Counter[str]) -> None:
    """Wait until an owner's usage is what is expected, and check that it is never more."""

    def has_arrived() -> bool:
        reported = total(usage_of(server, key))
        assert reported <= expected, reported
        return reported == expected

    wait_until(has_arrived, f"usage of {expected}")


def seconds(rows: Sequence[dict[str, Any]]) -> float:
    return float(sum(row["engine_seconds"] for row in rows))


def a_training_client(server: Server, key: str) -> tinker.TrainingClient:
    client = server.client(key)
    return client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def sample(sampler: tinker.SamplingClient, num_samples: int, max_tokens: int) -> None:
    params = types.SamplingParams(max_tokens=max_tokens, stop=[], seed=1)
    sampler.sample(types.ModelInput.from_ints(PROMPT), num_samples, params).result()


def a_batch(tokens: Sequence[int]) -> dict[str, Any]:
    targets = {"data": [1] * len(tokens), "dtype": "int64", "shape": [len(tokens)]}
    chunk = {"type": "encoded_text", "tokens": list(tokens)}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": targets}}
    return {"data": [datum], "loss_fn": "cross_entropy"}


def test_tokens_of_two_owners_are_counted_by_model_and_by_kind(
    own_server: Server, ann: str, bob: str
) -> None:
    anns, bobs = (a_training_client(own_server, key) for key in (ann, bob))

    step(anns)
    anns.forward_backward([a_datum(5), a_datum(6)], "cross_entropy").result()
    score(anns, [5, 6, 7])
    saved = anns.save_weights_for_sampler("usage").result().path
    step(bobs)
    of_bobs = bobs.save_weights_and_get_sampling_client().result()
    sample(of_bobs, 3, max_tokens=7)
    sample(of_bobs, 1, max_tokens=2)
    sample(own_server.client(bob).create_sampling_client(base_model=MODEL).result(), 1, 1)
    sample(own_server.client(ann).create_sampling_client(model_path=saved).result(), 2, 3)

    of_ann = Counter(
        trained_tokens=3 * DATUM_TOKENS,
        forward_tokens=2,
        prefill_tokens=len(PROMPT),
        sampled_tokens=2 * 3,
    )
    of_bobs_model = Counter(
        trained_tokens=DATUM_TOKENS,
        prefill_tokens=len(PROMPT) + 1,
        cached_tokens=len(PROMPT) - 1,
        sampled_tokens=3 * 7 + 2,
    )
    of_the_base = Counter(prefill_tokens=len(PROMPT), sampled_tokens=1)
    await_usage(own_server, ann, of_ann)
    await_usage(own_server, bob, of_bobs_model + of_the_base)
    rows = {row["model_id"]: row for row in usage_of(own_server, bob, by="model")}
    by_model = {model: total([row]) for model, row in rows.items()}
    assert by_model == {bobs.model_id: of_bobs_model, None: of_the_base}
    assert {row["model_id"] for row in usage_of(own_server, ann)} == {anns.model_id}
    assert {row["base_model"] for row in rows.values()} == {MODEL}
    assert all(row["engine_seconds"] > 0 for row in rows.values())
    for by in ("hour", "day", "key"):
        assert total(usage_of(own_server, ann, by=by)) == of_ann
    table = own_server.command(
        "usage", "--by", "key", "--api-key", ann, "--base-url", own_server.url
    )
    assert [row["key_name"] for row in usage_of(own_server, ann, by="key")] == ["ann"]
    assert re.search(r"\d ann +ann ", table)
    for kind in ("trained", "forward", "prefill", "cached", "sampled"):
        counted = own_server.metric("tinkercloud_usage_tokens_total", owner="ann", kind=kind)
        assert counted == of_ann[f"{kind}_tokens"]
    assert own_server.metric("tinkercloud_usage_engine_seconds_total", owner="ann") > 0
    _check_month(own_server, ann, of_ann)


def _check_month(server: Server, key: str, used: Counter[str]) -> None:
    """Check what an owner's month costs, and in which forms it is printed."""
    month = datetime.now(UTC).strftime("%Y-%m")
    call = ("usage", "--month", month, "--api-key", key, "--base-url", server.url)
    answer = json.loads(server.command(*call, "--json"))
    (row,) = answer["usage"]
    (line,) = csv.DictReader(io.StringIO(server.command(*call, "--csv")))

    trained = used["trained_tokens"] + used["forward_tokens"]
    assert (row["owner"], row["base_model"], row["train_tokens"]) == ("ann", MODEL, trained)
    assert row["cost"] == answer["total"] == trained + 2 * used["sampled_tokens"]
    assert (float(line["cost"]), line["currency"]) == (row["cost"], "EUR")
    assert f"total: {row['cost']} EUR" in server.command(*call)
    by_day = json.loads(server.command(*call, "--by", "day", "--json"))
    assert sum(day["cost"] for day in by_day["usage"]) == pytest.approx(answer["total"])
    assert by_day["total"] == pytest.approx(answer["total"])
    assert {day["day"][:7] for day in by_day["usage"]} == {month}
    days = list(csv.DictReader(io.StringIO(server.command(*call, "--by", "day", "--csv"))))
    assert [(day["day"], float(day["cost"])) for day in days] == [
        (day["day"], day["cost"]) for day in by_day["usage"]
    ]
    assert [days[0]["day"], "ann"] in [
        line.split()[:2] for line in server.command(*call, "--by", "day").splitlines()
    ]
    path = "/api/v1/usage/month?month="
    assert server.request("GET", f"{path}{month}&owner=bob&by=day", key=key).status == 404
    assert server.request("GET", f"{path}{month}&by=hour", key=key).status == 400
    for wrong in ("2026-13", "1999-12", "november", "2026-11-01"):
        assert "expected year and month" in server.request("GET", path + wrong, key=key).detail
    assert server.request("GET", f"{path}2001-01", key=key).json()["usage"] == []


def test_restarts_and_killed_processes_lose_nothing_that_was_reported(
    own_server: Server, ann: str
) -> None:
    training, expected = a_training_client(own_server, ann), total(usage_of(own_server, ann))
    engine_seconds = seconds(usage_of(own_server, ann))

    for end in (own_server.stop, own_server.kill):
        step(training)
        expected["trained_tokens"] += DATUM_TOKENS
        end()
        own_server.start()
        await_usage(own_server, ann, expected)
        assert seconds(usage_of(own_server, ann)) > engine_seconds
        engine_seconds = seconds(usage_of(own_server, ann))

    step(training)
    expected["trained_tokens"] += DATUM_TOKENS
    await_usage(own_server, ann, expected)
    own_server.kill_heads()
    step(a_training_client(own_server, ann))
    expected["trained_tokens"] += DATUM_TOKENS
    await_usage(own_server, ann, expected)


def test_a_repeated_request_is_counted_once_and_a_failed_one_never(
    own_server: Server, ann: str
) -> None:
    training, expected = a_training_client(own_server, ann), total(usage_of(own_server, ann))
    body = {"model_id": training.model_id, "seq_id": 1, "forward_backward_input": a_batch([5, 6])}
    bad = {**body, "seq_id": 2, "forward_backward_input": a_batch([5, 10**6])}

    promises = [own_server.post("forward_backward", body, key=ann).json() for _ in range(3)]
    statuses = [own_server.result(p["request_id"], key=ann).status for p in promises]
    failed = own_server.post("forward_backward", bad, key=ann).json()
    error = own_server.result(failed["request_id"], key=ann).json()["error"]
    step(a_training_client(own_server, ann))

    assert statuses == [200] * 3
    assert "1000000" in error
    expected["trained_tokens"] += 2 + DATUM_TOKENS
    await_usage(own_server, ann, expected)


def test_owners_see_their_own_usage_and_admins_that_of_all(
    own_server: Server, ann: str, bob: str
) -> None:
    training, expected = a_training_client(own_server, ann), total(usage_of(own_server, ann))
    step(training)
    expected["trained_tokens"] += DATUM_TOKENS
    await_usage(own_server, ann, expected)
    training.save_state("kept").result()
    listed = own_server.rest(ann).list_user_checkpoints().result().checkpoints

    own = own_server.request("GET", "/api/v1/usage", key=ann).json()
    everybody = usage_of(own_server, ann, access_scope="accessible")
    of_ann = usage_of(own_server, API_KEY, owner="ann")
    page = own_server.request("GET", "/api/v1/usage?access_scope=accessible").json()
    refused = own_server.request("GET", "/api/v1/usage?owner=ann", key=bob)
    bad = ["by=week", "since=yesterday", "until=2026-01-01T00:00:00", "limit=0", "owner=%00"]
    rejected = {query: own_server.request("GET", f"/api/v1/usage?{query}") for query in bad}

    far = "since=0001-01-01T00:00:00%2B01:00&until=9999-12-31T23:30:00-01:00"
    assert own_server.request("GET", f"/api/v1/usage?{far}").status == 200
    assert {row["owner"] for row in everybody} == {"ann"}
    assert of_ann == own["usage"]
    assert {"ann", "bob"} <= {row["owner"] for row in page["usage"]}
    assert own["storage"] == [
        {
            "owner": "ann",
            "checkpoints": len(listed),
            "size_bytes": sum(checkpoint.size_bytes or 0 for checkpoint in listed),
        }
    ]
    assert own["storage"][0] in page["storage"]
    assert refused.status == 404
    assert {query: each.status for query, each in rejected.items()} == dict.fromkeys(bad, 400)
    for query, each in rejected.items():
        assert query.partition("=")[0] in each.detail or "U+0000" in each.detail
    assert total(usage_of(own_server, ann, since="2020-01-01T00:00:00Z")) == expected
    assert usage_of(own_server, ann, until="2020-01-01T00:00:00Z") == []


def test_the_command_lists_usage_and_storage(own_server: Server, ann: str) -> None:
    training, expected = a_training_client(own_server, ann), total(usage_of(own_server, ann))
    step(training)
    expected["trained_tokens"] += DATUM_TOKENS
    await_usage(own_server, ann, expected)

    text = own_server.command("usage", "--owner", "ann", "--api-key", API_KEY)
    by_day = own_server.command("usage", "--by", "day", "--json", "--api-key", ann)

    assert training.model_id in text
    assert {"ann", "trained", "cached", "checkpoints"} <= set(text.split())
    assert total(json.loads(by_day)["usage"]) == expected


def test_usage_of_a_time_is_printed_as_a_table_and_as_csv(own_server: Server, ann: str) -> None:
    expected = total(usage_of(own_server, ann))
    step(a_training_client(own_server, ann))
    expected["trained_tokens"] += DATUM_TOKENS
    await_usage(own_server, ann, expected)

    def printed(*options: str) -> str:
        caller = ("--base-url", own_server.url, "--api-key", ann)
        return own_server.command("usage", "--by", "hour", *caller, *options)

    rows = list(csv.DictReader(io.StringIO(printed("--csv", "--since", "2020-01-01"))))

    listed = usage_of(own_server, ann, by="hour")
    assert [(row["starts_at"], row["owner"]) for row in rows] == [
        (each["starts_at"], "ann") for each in listed
    ]
    assert [int(row["trained_tokens"]) for row in rows] == [
        each["trained_tokens"] for each in listed
    ]
    assert moment(listed[0]["starts_at"]) in printed("--until", "9000-01-01T12:00")
    assert not list(csv.DictReader(io.StringIO(printed("--csv", "--until", "2020-01-01"))))
    assert json.loads(printed("--json", "--until", "2020-01-01"))["usage"] == []

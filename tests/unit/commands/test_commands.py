"""What all `tinkercloud` commands have in common."""

import asyncio
import csv
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import typer
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner, Result

from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.cli import app
from tinkercloud_api.commands import (
    audit_commands,
    checkpoint_commands,
    program_commands,
    run_commands,
    usage_commands,
)
from tinkercloud_api.commands.common import shared
from tinkercloud_api.commands.common.progress import (
    CopyProgress,
    StateProgress,
    copying,
    note_output,
    waiting,
)
from tinkercloud_api.config.readable import binary_size, moment
from tinkercloud_protocol.responses.listings import BilledUsage, CheckpointInfo
from tinkercloud_protocol.responses.run_states import RunInfo
from tinkercloud_testing.resources.charts import ROOT

HEAVY = ("aiohttp", "alembic", "fastapi", "obstore", "pydantic", "rich", "sqlalchemy", "structlog")


def help_texts(group: object) -> Iterator[str]:
    """Yield what the help of all commands says about them and their parameters."""
    for each in (group, *getattr(group, "params", ())):
        yield getattr(each, "help", None) or ""
    for command in getattr(group, "commands", {}).values():
        yield from help_texts(command)


def test_help_is_shown_as_it_is_written() -> None:
    # `:train:` of an id would become an emoji, and words in brackets a style.
    texts = set(help_texts(get_command(app)))

    assert {Text.from_markup(text).plain for text in texts} == texts


def test_a_completion_loads_nothing_that_only_a_running_command_needs() -> None:
    code = f"import sys, tinkercloud_api.cli; print({set(HEAVY)} & set(sys.modules))"

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "set()"


def test_sizes_are_in_binary_units() -> None:
    assert [binary_size(size) for size in (0, 1023, 1536, 5 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5.0 TiB",
    ]


def test_times_are_in_utc_to_the_second() -> None:
    local = timezone(timedelta(hours=2))

    assert moment(datetime(2026, 11, 28, 21, 14, 30, 5, local)) == "2026-11-28T19:14:30Z"
    assert moment("2026-11-28T19:14:30.123456Z") == "2026-11-28T19:14:30Z"
    assert moment("2026-11-28T19:14:30+00:00") == "2026-11-28T19:14:30Z"
    assert not moment(None)


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("2026-11-28", "2026-11-28T00:00:00Z"),
        ("2026-11-28T19:14", "2026-11-28T19:14:00Z"),
        ("2026-11-28 19:14:30", "2026-11-28T19:14:30Z"),
        ("2026-11-28T19:14:30Z", "2026-11-28T19:14:30Z"),
        ("2026-11-28T21:14:30+02:00", "2026-11-28T19:14:30Z"),
    ],
)
@pytest.mark.parametrize("command", ["usage", "audit"])
def test_times_can_be_given_as_they_are_printed_and_with_less(
    command: str, given: str, parsed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def record(*arguments: object) -> object:
        sent.append(str(arguments[-1]))
        return {"entries": [], "usage": [], "storage": []}

    for each in (usage_commands, audit_commands):
        monkeypatch.setattr(each, "request", record)
    call = [command, "--since", given, "--until", given, "--api-key", "tml-key"]
    result = CliRunner().invoke(app, call)

    assert result.exit_code == 0, result.output
    query = parse_qs(urlsplit(sent[0]).query)
    assert (query["since"], query["until"]) == ([parsed], [parsed])


@pytest.mark.parametrize("given", ["yesterday", "28.11.2026", "0001-01-01T00:00:00+14:00", ""])
def test_what_is_no_time_is_refused_with_the_accepted_forms(given: str) -> None:
    call = ["usage", "--since", given, "--api-key", "tml-key"]
    result = CliRunner().invoke(app, call, env={"COLUMNS": "1000"})

    assert result.exit_code == 2
    assert f"{given!r} is not a time; expected a day or a time" in result.stderr
    assert "2026-11-28T19:14" in result.stderr


def test_times_are_written_in_one_place() -> None:
    source = ROOT / "api_server" / "src"
    written = re.compile(r"strftime\(|strptime\(|%H:%M|formats=\[(?!\"%Y-%m-%d\"\])")
    files = [f for kind in ("*.py", "*.html") for f in source.rglob(kind)]
    found = {f.name for f in files if written.search(f.read_text())}
    assert found == {"readable.py"}


class Terminal:
    """Standard error of a command in a terminal."""

    def __init__(self) -> None:
        self.written = ""
        self.has_waited = threading.Event()

    def isatty(self) -> bool:
        return True

    def flush(self) -> None: ...

    def write(self, text: str) -> None:
        self.written += text
        if text.count("for 0 s"):
            self.has_waited.set()


def test_a_terminal_shows_progress_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = CopyProgress("uploaded", 2048)
    progress(2048)
    progress.finish()

    last = terminal.written.splitlines()[-1]
    assert last.endswith(f"[{'#' * 20}] uploaded 2.0 KiB of 2.0 KiB")


def test_a_bar_is_filled_as_far_as_the_work_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = CopyProgress("uploaded", 2048)
    progress(1024)
    while "1.0 KiB of" not in terminal.written:
        progress(0)

    assert f"[{'#' * 10}{' ' * 10}] uploaded 1.0 KiB of 2.0 KiB" in terminal.written


def test_a_wait_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, done = Terminal(), iter(range(1, 1_000_000))
    monkeypatch.setattr("sys.stderr", terminal)
    with waiting(lambda: f"read {next(done)} runs"):
        while "read 2 runs, for" not in terminal.written:
            time.sleep(0.01)

    assert "read 1 runs, for" in terminal.written
    assert terminal.written.count("\n") == 1


def test_a_copy_whose_last_bytes_take_long_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("tinkercloud_api.commands.common.progress._LINE_SECONDS", 0.5)
    monkeypatch.setattr("tinkercloud_api.commands.common.progress._SHORTEST_SECONDS", 0.0)

    with copying("copied", 2048) as progress:
        progress(2048)
        while "copied 2.0 KiB of 2.0 KiB, for" not in terminal.written:
            time.sleep(0.01)

    assert terminal.written.splitlines()[-1].endswith(f"[{'#' * 20}] copied 2.0 KiB of 2.0 KiB")


def test_a_command_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("tinkercloud_api.commands.common.progress._LINE_SECONDS", 0.0)
    monkeypatch.setattr("tinkercloud_api.commands.common.progress._SHORTEST_SECONDS", 0.0)

    with waiting("waiting for the server"):
        assert terminal.has_waited.wait(60)

    assert "waiting for the server, for 0 s" in terminal.written
    assert terminal.written.endswith("\n")


def test_short_waits_in_a_row_are_not_silent_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tinkercloud_api.commands.common.progress._LINE_SECONDS", 1.0)
    monkeypatch.setattr("tinkercloud_api.commands.common.progress._SHORTEST_SECONDS", 0.1)
    note_output()
    for part in range(4):
        with waiting(f"waiting for part {part}"):
            time.sleep(0.5)

    assert "waiting for part" in capsys.readouterr().err


def test_the_time_of_imports_counts_as_silence_of_a_command() -> None:
    code = """
import time, tinkercloud_api.process_start
time.sleep(1)
from tinkercloud_api.commands.common import progress
progress._LINE_SECONDS = 1.0
progress.CopyProgress("copied", None)(1024)
"""

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stderr == "copied 1.0 KiB\n"


def test_a_short_wait_says_nothing_even_after_a_long_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tinkercloud_api.commands.common.progress._LINE_SECONDS", 0.0)
    monkeypatch.setattr("tinkercloud_api.commands.common.progress._SHORTEST_SECONDS", 60.0)

    with waiting("waiting for the server"):
        time.sleep(0.5)

    assert not capsys.readouterr().err


def test_watch_prints_again_until_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[datetime] = []

    def draw() -> None:
        drawn.append(datetime.now(UTC))
        if len(drawn) == 3:
            raise KeyboardInterrupt

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(shared, "WATCH_SECONDS", 0.0)
    with pytest.raises(typer.Exit) as ended:
        shared.watch(draw, again=True)

    assert len(drawn) == 3
    assert terminal.written == shared._CLEAR * 2
    assert ended.value.exit_code == 0
    drawn.clear()
    shared.watch(draw, again=False)
    assert len(drawn) == 1


def test_an_error_is_one_line_that_can_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    message = "no such folder: " + "/a/long/path" * 20

    with pytest.raises(typer.Exit):
        shared.fail(message)

    assert capsys.readouterr().err == f"error: {message}\n"


HOSTILE = "a\x1b]0;title\x07\x9b2J\u202eb"
"""A name that would change the title of a terminal, clear it, and turn the direction of text."""
SHOWN = "a�]0;title��2J�b"


def test_tables_and_errors_show_control_characters_instead_of_sending_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared.show([{"name": HOSTILE, "owner": HOSTILE}], ["name", "owner"], as_json=False)
    with pytest.raises(typer.Exit):
        shared.fail(f"{HOSTILE}\nsecond line")

    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].split() == [SHOWN, SHOWN]
    assert printed.err == f"error: {SHOWN}\nsecond line\n"


def test_the_doctor_says_what_it_does_before_it_loads_its_checks() -> None:
    code = """
import sys, tinkercloud_api.cli as cli

def waiting(what):
    sys.exit(f"{what()}: {'tinkercloud_api.admin.doctor' in sys.modules}")

cli.waiting = waiting
cli.app(["doctor"])
"""
    command = [sys.executable, "-c", code]

    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr

    assert said == "checking this machine (checks done: 0): False\n"


def test_entries_of_the_audit_log_without_a_status_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The entries that releases up to 0.1 wrote of logins to the console.
    details = {"owner": "ann", "key_id": 1, "number": 7, "hash": "abc"}
    entry = {"timestamp": "2026-11-28T19:14:30Z", "event": "console_login"}
    page = {"entries": [{**entry, "event_details": details}]}
    monkeypatch.setattr(audit_commands, "request", lambda *_: page)

    listed = CliRunner().invoke(app, ["audit", "--api-key", "tml-key"])

    assert listed.stdout.splitlines()[1].split() == [
        *("2026-11-28T19:14:30Z", "ann", "1", "console_login")
    ]


def test_fields_of_a_run_do_not_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = "2026-11-28T19:14:30+00:00"
    run = dict.fromkeys(("project_id", "step", "loss", "lora_rank", "unsaved_steps"))
    run |= {"queue_reason": None}
    run |= {"run_id": "a:train:0", "tokens_per_minute": 0, "created_at": moment}
    run |= {"last_seen_at": moment, "queue_state": "active", "state": "lost", "checkpoints": []}
    run |= dict.fromkeys(("owner", "name", "base_model", "reason"), HOSTILE)
    monkeypatch.setattr(run_commands, "request", lambda *_: run)

    shown = CliRunner().invoke(app, ["runs", "show", "a:train:0", "--api-key", "tml-key"])

    lines = [f"{name}: {SHOWN}" for name in ("owner", "name", "model", "reason")]
    assert set(lines) <= set(shown.stdout.splitlines())


def test_an_empty_audit_log_is_not_taken_for_a_complete_one(tmp_path: Path) -> None:
    engine = open_database(f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}")
    asyncio.run(migrate(engine))
    checked = CliRunner().invoke(app, ["audit", "verify", "--state-dir", str(tmp_path)])

    assert checked.exit_code == 0
    assert "warning: no row is in this catalog; if your server uses another" in checked.stderr


@pytest.mark.parametrize(
    "command", ["audit verify", "audit export", "keys list", "users list", "users show me"]
)
def test_a_command_that_reads_creates_no_catalog(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "other"
    read = CliRunner().invoke(app, [*command.split(), "--state-dir", str(folder)])

    assert read.exit_code == 1
    assert f"there is no catalog in {folder}: no server has used this folder" in read.stderr
    assert not folder.exists()


@pytest.mark.parametrize(
    ("seen", "newest", "added"),
    [
        ("", "one\n", "one\n"),
        ("one\n", "one\n", ""),
        ("one\n", "one\ntwo\n", "two\n"),
        ("a" * 100 + "b" * 100, "\ufffd" + "a" * 50 + "b" * 100 + "c", "c"),
        ("a" * 100, "b" * 100, "b" * 100),
    ],
)
def test_following_an_output_prints_each_part_of_it_once(
    seen: str, newest: str, added: str
) -> None:
    assert program_commands.added_output(seen, newest) == added


def test_an_audit_log_of_others_does_not_control_the_terminal(tmp_path: Path) -> None:
    row = {
        "id": 7,
        "at": "2026-11-28T19:14:30Z",
        "owner": HOSTILE,
        "key_id": None,
        "event": HOSTILE,
    }
    row |= {"details": {}, "outcome_of": None, "hash": HOSTILE}
    (tmp_path / "log").write_text(f"{json.dumps(row)}\n")

    checked = CliRunner().invoke(app, ["audit", "verify", str(tmp_path / "log")])

    assert checked.exit_code == 1
    assert f"newest: 7:{SHOWN}" in checked.stdout.splitlines()
    assert "\x1b" not in checked.output


def test_a_progress_line_and_a_question_do_not_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    StateProgress()(HOSTILE)
    asked: list[str] = []

    def answer(question: str, **_: object) -> bool:
        asked.append(question)
        return True

    monkeypatch.setattr(typer, "confirm", answer)
    shared.confirm(f"End {HOSTILE}?", skipped=False)

    assert capsys.readouterr().err == f"{SHOWN}\n"
    assert asked == [f"End {SHOWN}?"]


def test_a_name_that_is_not_text_is_refused_before_it_is_recorded(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["keys", "create", "b\udcff", "--state-dir", str(tmp_path)])

    assert made.stderr == "error: 'b\\udcff' is not UTF-8 text; use a name that is\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["keys", "create", "ci", "--owner"], ["keys", "create"], ["users", "create"]],
    ids=" ".join,
)
def test_no_owner_gets_the_name_of_a_group(arguments: list[str], tmp_path: Path) -> None:
    made = CliRunner().invoke(app, [*arguments, "group:vision", "--state-dir", str(tmp_path)])

    assert "'group:vision': a name with group: is that of a group of OpenID" in made.stderr
    assert made.exit_code == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("by", "grouped"),
    [
        ("model", ["model_id"]),
        ("project", ["project_id"]),
        ("key", ["key_id", "key_name"]),
        ("day", []),
    ],
)
def test_usage_as_csv_has_only_columns_that_its_rows_can_fill(
    by: str, grouped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"owner": "ann", "base_model": "m", "model_id": "s:train:0", "project_id": "p"}
    row |= {"key_id": "1", "key_name": "ci"}
    monkeypatch.setattr(usage_commands, "request", lambda *_: {"usage": [row]})

    printed = CliRunner().invoke(app, ["usage", "--by", by, "--csv", "--api-key", "tml-key"])

    header, *rows = csv.reader(printed.stdout.splitlines())
    groups = {"model_id", "project_id", "key_id", "key_name"}
    assert [name for name in header if name in groups] == grouped
    assert [dict(zip(header, each, strict=True))["base_model"] for each in rows] == ["m"]


@pytest.mark.parametrize(
    "option",
    [("--by", "hour"), ("--since", "2026-11-02"), ("--until", "2026-11-03"), ("--limit", "5")],
)
def test_options_that_a_month_would_ignore_are_refused(option: tuple[str, str]) -> None:
    call = ["usage", "--month", "2026-11", *option, "--api-key", "tml-key"]

    refused = CliRunner().invoke(app, call)

    assert refused.exit_code == 1
    said = " ".join(refused.stderr.split())
    assert f"--month, {option[0]}: a month is listed as a whole" in said


def test_a_month_is_printed_with_costs_of_four_decimals_and_exported_with_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = dict.fromkeys(BilledUsage.model_fields, 1) | {"cost": 0.000212}
    answer = {"usage": [row], "total": 0.000212, "currency": "EUR"}
    monkeypatch.setattr(usage_commands, "request", lambda *_: answer)
    call = ["usage", "--month", "2026-11", "--api-key", "tml-key"]

    table, exported = (CliRunner().invoke(app, [*call, *more]).stdout for more in ([], ["--csv"]))

    assert "total: 0.0002 EUR" in table
    assert "0.000212" not in table
    assert "0.000212,EUR" in exported


def test_a_month_without_prices_has_no_total(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dict.fromkeys(BilledUsage.model_fields, 1) | {"cost": None}
    answer = {"usage": [row], "total": 0.0, "currency": "USD"}
    monkeypatch.setattr(usage_commands, "request", lambda *_: answer)

    table = CliRunner().invoke(app, ["usage", "--month", "2026-11", "--api-key", "tml-key"]).stdout

    assert "total" not in table
    assert table.endswith("-: no price in the setting `prices` of the server\n")


def test_a_table_in_a_pipe_has_one_line_for_each_row_whatever_it_contains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = f"tinker://{'9' * 36}:train:0/weights/{'n' * 60}"
    rows = [{"name": "名前" * 20, "id": "9f0f6c6a", "path": f"{path} and {path}"}]

    shared.show(rows, ["name", "id", "path"], as_json=False)

    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["name", "id", "path"]
    assert line.split() == [rows[0]["name"], "9f0f6c6a", path, "and", path]
    assert line == line.rstrip()


@pytest.mark.parametrize("by", ["project", "key"])
def test_small_costs_are_exported_as_decimals(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row: dict[str, object] = dict.fromkeys(BilledUsage.model_fields, 1)
    row |= {"cost": 0.000012, "storage_gib_months": 1e-06, "key_name": 'at "1e-05"'}
    answer = {"usage": [row], "total": 1.2e-05, "currency": "EUR"}
    monkeypatch.setattr(usage_commands, "request", lambda *_: answer)
    call = ["usage", "--month", "2026-11", "--by", by, "--api-key", "tml-key"]

    printed = CliRunner().invoke(app, [*call, "--json"]).stdout
    (line,) = csv.DictReader(CliRunner().invoke(app, [*call, "--csv"]).stdout.splitlines())

    assert json.loads(printed) == answer
    assert '"cost": 0.000012' in printed
    assert '"total": 0.000012' in printed
    assert (line["cost"], line["storage_gib_months"]) == ("0.000012", "0.000001")
    assert line.get("key_name") == (row["key_name"] if by == "key" else None)
    assert ("project_id" in line) == (by == "project")


def test_a_run_that_waits_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = "2026-11-28T19:14:30+00:00"
    run = dict.fromkeys(("owner", "project_id", "name", "base_model", "step", "loss"))
    run |= {"run_id": "a:train:0", "tokens_per_minute": 0, "state": "live"}
    run |= {"created_at": moment, "last_seen_at": moment}
    waits = {**run, "queue_state": "waiting", "queue_reason": "9 earlier ones", "reason": "unsafe"}
    is_lost = {**run, "queue_state": "idle", "queue_reason": None, "reason": "no disk"}
    monkeypatch.setattr(run_commands, "request", lambda *_: {"runs": [waits, is_lost]})

    printed = CliRunner().invoke(app, ["runs", "list", "--api-key", "tml-key"]).stdout

    header, *rows = printed.splitlines()
    why = header.index("why")
    assert [row[why:].strip() for row in rows] == ["9 earlier ones", "no disk"]


def test_runs_as_csv_have_the_fields_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"run_id": "a:train:0", "name": 'a, "b"', "queue_reason": HOSTILE, "step": None}
    monkeypatch.setattr(run_commands, "request", lambda *_: {"runs": [run]})
    list_runs = ["runs", "list", "--csv", "--api-key", "tml-key"]

    header, *rows = csv.reader(CliRunner().invoke(app, list_runs).stdout.splitlines())
    both = CliRunner().invoke(app, [*list_runs, "--json"])

    assert header == list(RunInfo.model_fields)
    [found] = [dict(zip(header, each, strict=True)) for each in rows]
    assert {name: value for name, value in found.items() if value} == {
        "run_id": "a:train:0",
        "name": 'a, "b"',
        "queue_reason": SHOWN,
    }
    assert both.stderr == "error: --csv, --json: choose one of them\n"


def test_checkpoints_as_csv_have_the_fields_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = {"tinker_path": "tinker://a:train:0/weights/1", "size_bytes": 5, "damage": HOSTILE}
    answer = {"checkpoints": [checkpoint | {"expires_at": None}]}
    monkeypatch.setattr(checkpoint_commands, "request", lambda *_: answer)
    list_checkpoints = ["checkpoints", "list", "--csv", "--api-key", "tml-key"]

    header, *rows = csv.reader(CliRunner().invoke(app, list_checkpoints).stdout.splitlines())
    both = CliRunner().invoke(app, [*list_checkpoints, "--json"])

    assert header == list(CheckpointInfo.model_fields)
    [found] = [dict(zip(header, each, strict=True)) for each in rows]
    assert {name: value for name, value in found.items() if value} == {
        "tinker_path": "tinker://a:train:0/weights/1",
        "size_bytes": "5",
        "damage": SHOWN,
    }
    assert both.stderr == "error: --csv, --json: choose one of them\n"


FORMULA = "=HYPERLINK(A1)"


@pytest.mark.parametrize(
    ("call", "answer", "column"),
    [
        (["runs", "list"], {"runs": [{"name": FORMULA, "step": -0.5}]}, "name"),
        (["usage", "--by", "key"], {"usage": [{"key_name": FORMULA, "owner": "-1"}]}, "key_name"),
        (
            ["audit"],
            {"entries": [{"timestamp": "", "event": "", "event_details": {"key_name": FORMULA}}]},
            "key_name",
        ),
    ],
)
def test_names_that_spreadsheets_would_compute_are_texts_in_csv_and_numbers_stay(
    call: list[str], answer: object, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (run_commands, usage_commands, audit_commands):
        monkeypatch.setattr(each, "request", lambda *_: answer)

    printed = CliRunner().invoke(app, [*call, "--csv", "--api-key", "tml-key"]).stdout

    (row,) = csv.DictReader(printed.splitlines())
    assert row[column] == f"'{FORMULA}"
    assert [value for value in row.values() if value.startswith("'")] == [row[column]]


def test_a_rotated_key_is_printed_alone_and_its_end_on_standard_error(tmp_path: Path) -> None:
    def keys(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["keys", *arguments, "--state-dir", str(tmp_path)])

    assert keys("create", "ada", "--expires", "1h").exit_code == 0
    rotated = keys("rotate", "1", "--overlap", "24h")
    listed = json.loads(keys("list", "--json").stdout)

    assert re.fullmatch(r"tml-\S+\n", rotated.stdout)
    # It would have ended earlier anyway.
    assert f"key 1 ends at {listed[0]['expires']}" in rotated.stderr

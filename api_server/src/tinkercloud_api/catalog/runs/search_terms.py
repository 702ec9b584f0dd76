"""The index of the search for runs and sessions.

A row of `SearchTerm` is a text of a run or session, from the beginning of a word to the next space.
The search finds what has a term that begins with the searched word, and so reads no table whole.
"""

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TypeVar

from sqlalchemy import ColumnElement, Select, and_, or_, select, true

from tinkercloud_api.catalog.schema.statements import Statements
from tinkercloud_api.catalog.schema.tables import Project, SearchTerm, Session, TrainingRun

MAX_TERMS = 100
"""Limit of terms of a run or session; later words are not found."""
_MAX_CHARACTERS = 64
"""Length of terms and of searched words; what follows is ignored."""
_MAX_TEXT_CHARACTERS = MAX_TERMS * _MAX_CHARACTERS
"""Characters of a text that are read: metadata may be long, and is indexed on the event loop."""
_RUN, _SESSION = "run", "session"
_WORD = re.compile(r"[^\W_]+")
_BATCH = 100
"""Rows whose terms one transaction adds."""

SearchedT = TypeVar("SearchedT", Session, TrainingRun)


class SearchTerms(Statements):
    """Adds the terms of what earlier versions have recorded."""

    async def make_searchable(self) -> None:
        """Add the terms of the runs and sessions that have none. This is idempotent."""
        while await self._add_terms(Session, terms_of_session):
            pass
        while await self._add_terms(TrainingRun, terms_of_run):
            pass

    async def _add_terms(
        self, table: type[SearchedT], terms_of: Callable[[SearchedT], list[SearchTerm]]
    ) -> bool:
        """Add the terms of some rows, and return whether others may be left."""
        query = select(table).where(table.is_searchable.is_(False)).limit(_BATCH)
        async with self._writing() as db:
            # Another replica may do so at the same time.
            rows = await db.scalars(query.with_for_update(of=table, skip_locked=True))
            found = rows.all()
            for row in found:
                db.add_all(terms_of(row))
        return len(found) == _BATCH


def terms_of_run(run: TrainingRun) -> list[SearchTerm]:
    """Return the terms of a run: id, owner, base model and metadata. It has them from now on."""
    run.is_searchable = True
    texts = run.owner, run.base_model, *_texts(run.user_metadata or {})
    return _rows(_RUN, run.id, texts)


def terms_of_session(session: Session) -> list[SearchTerm]:
    """Return the terms of a session: id, owner, name, tags and metadata. As `terms_of_run`."""
    session.is_searchable = True
    texts = session.owner, session.display_name or "", *session.tags
    return _rows(_SESSION, session.id, (*texts, *_texts(session.user_metadata)))


def found_runs(text: str) -> ColumnElement[bool]:
    """Return the condition for runs that have each word of a text, or whose sessions have it."""
    return and_(true(), *(TrainingRun.id.in_(_runs_with(word)) for word in _words(text)))


def found_sessions(text: str) -> ColumnElement[bool]:
    """Return the condition for sessions that have each word of a text, or whose projects do."""
    return and_(true(), *(Session.id.in_(_sessions_with(word)) for word in _words(text)))


def _runs_with(word: str) -> Select[str]:
    of_sessions = select(TrainingRun.id).where(TrainingRun.session_id.in_(_sessions_with(word)))
    return select(_with(_RUN, word).union(of_sessions).subquery().c.id)


def _sessions_with(word: str) -> Select[str]:
    names = (column.icontains(word, autoescape=True) for column in (Project.id, Project.name))
    of_projects = select(Session.id).where(
        Session.project_id.in_(select(Project.id).where(or_(*names)))
    )
    return select(_with(_SESSION, word).union(of_projects).subquery().c.id)


def _with(kind: str, word: str) -> Select[str]:
    """Return the query for the ids of what has a term that begins with a word."""
    after = word + chr(sys.maxunicode)
    return select(SearchTerm.id).where(
        SearchTerm.kind == kind, SearchTerm.term >= word, SearchTerm.term < after
    )


def _words(text: str) -> list[str]:
    """Return the words that must be found, without those with which another one begins."""
    words = sorted({part[:_MAX_CHARACTERS] for part in _folded(text).split()})
    return [word for word, following in pairwise((*words, "")) if not following.startswith(word)]


def _rows(kind: str, object_id: str, texts: Iterable[str]) -> list[SearchTerm]:
    terms = {_folded(object_id)[:_MAX_CHARACTERS]: None}
    for term in _terms(texts):
        if len(terms) == MAX_TERMS:
            break
        terms[term] = None
    return [SearchTerm(kind=kind, term=term, id=object_id) for term in terms]


def _terms(texts: Iterable[str]) -> Iterable[str]:
    """Yield the texts from the beginning of each part and word on, to the next space."""
    for text in texts:
        for part in _folded(text[:_MAX_TEXT_CHARACTERS]).split():
            yield part[:_MAX_CHARACTERS]
            for word in _WORD.finditer(part):
                yield part[word.start() : word.start() + _MAX_CHARACTERS]


def _texts(metadata: Mapping[str, str]) -> Iterable[str]:
    for name, value in metadata.items():
        yield from (name, value)


def _folded(text: str) -> str:
    """Return a text in lower case and one form, without what a database cannot store."""
    storable = text.replace("\0", " ").encode(errors="ignore").decode()
    return unicodedata.normalize("NFKC", storable).lower()

"""Which rows a list shows to a caller: a condition on owners and projects."""

from collections.abc import Set
from dataclasses import dataclass
from typing import TypeAlias

from sqlalchemy import ColumnElement, and_, false, or_, true

from tinkercloud_api.catalog.schema.tables import Checkpoint, Session, TrainingRun

Listed: TypeAlias = type[Session] | type[TrainingRun] | type[Checkpoint]


@dataclass(frozen=True, slots=True)
class Visibility:
    """What a list shows. By default, everything."""

    owner: str | None = None
    """Whose objects; None means those of all owners."""
    within: Set[str] | None = None
    """Projects outside of which these objects are left out, if they have one; None keeps all."""
    shared: Set[str] = frozenset()
    """Projects whose objects of all owners are shown as well."""

    def of(self, table: Listed) -> ColumnElement[bool]:
        """Return the condition for the rows of a table."""
        if self.owner is None:
            return true()
        own = table.owner == self.owner
        if self.within is not None:
            own = and_(own, or_(table.project.is_(None), table.project.in_(self.within)))
        return or_(own, table.project.in_(self.shared) if self.shared else false())


EVERYTHING = Visibility()

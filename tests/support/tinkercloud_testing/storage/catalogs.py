"""Changes a catalog in tests as no call of it does."""

from contextlib import AbstractAsyncContextManager

from sqlalchemy.ext.asyncio import AsyncSession

from tinkercloud_api.catalog.store import Catalog


def writing(catalog: Catalog) -> AbstractAsyncContextManager[AsyncSession]:
    """Return a transaction of a catalog."""
    return catalog._writing()

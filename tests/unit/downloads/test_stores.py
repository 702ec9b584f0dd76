"""URLs refer to the store if it can sign them and clients can reach it, otherwise to the server."""

from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import pytest
from obstore.store import AzureStore, LocalStore, MemoryStore, ObjectStore, S3Store

from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_protocol.wire.errors import Unavailable

STORES: dict[str, ObjectStore] = {
    "S3": S3Store("b", access_key_id="a", secret_access_key="b", region="us-east-1", prefix="p"),
    "Azure": AzureStore("b", account_name="a", account_key="AAAA"),
}
SIGNATURES = {"S3": "X-Amz-Signature", "Azure": "sig"}


@pytest.mark.parametrize("name", STORES)
async def test_cloud_stores_sign_urls_of_their_own(name: str) -> None:
    objects = ObjectStoreClient(STORES[name])

    urls = await objects.sign(["x/one", "x/two"], timedelta(hours=1))

    assert objects.has_public_urls
    assert [urlsplit(url).path.rpartition("/")[2] for url in urls] == ["one", "two"]
    assert all(SIGNATURES[name] in parse_qs(urlsplit(url).query) for url in urls)


def test_a_store_at_a_configured_address_may_be_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio.storage:9000")

    assert not ObjectStoreClient(STORES["S3"]).has_public_urls


@pytest.mark.parametrize("store", [MemoryStore(), LocalStore()])
async def test_stores_without_an_address_sign_nothing(store: ObjectStore) -> None:
    objects = ObjectStoreClient(store)

    assert not objects.has_public_urls
    with pytest.raises(Unavailable, match=r"downloads\.source"):
        await objects.sign(["x"], timedelta(hours=1))

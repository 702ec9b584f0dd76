"""Object stores are reached by HTTPS, unless an endpoint asks for HTTP."""

import pytest

from tinkercloud_protocol.heads.object_store import allows_http


@pytest.mark.parametrize(
    "environment",
    [
        {"AWS_ENDPOINT": "http://minio:9000"},
        {"AWS_ENDPOINT_URL": "http://minio:9000"},
        {"AWS_ENDPOINT_URL_S3": "http://minio:9000"},
        {"AZURE_STORAGE_ENDPOINT": "http://azurite:10000"},
        {"AZURE_STORAGE_USE_EMULATOR": "true"},
        {"GOOGLE_BASE_URL": "http://gcs:4443"},
    ],
)
def test_an_endpoint_of_http_asks_for_it(environment: dict[str, str]) -> None:
    assert allows_http({"HTTP_PROXY": "http://proxy", **environment})


@pytest.mark.parametrize(
    "environment",
    [{}, {"AWS_ENDPOINT": "https://s3.example.com"}, {"HTTP_PROXY": "http://proxy"}],
)
def test_nothing_else_does(environment: dict[str, str]) -> None:
    assert not allows_http(environment)

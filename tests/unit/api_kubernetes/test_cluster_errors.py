"""How clients of the API server see it when Kubernetes rejects a request."""

import pytest

from tinkercloud_api.providers.cluster.cluster_errors import wire_error
from tinkercloud_kube.errors import Expired, Rejected


def rejected(status: int, message: str) -> Rejected:
    request = "POST /apis/tinkercloud.dev/v1alpha1/namespaces/a/trainingsessions"
    return Rejected("its start", request=request, status=status, message=message)


@pytest.mark.parametrize(
    ("explanation", "remedy"),
    [
        ('User "api" cannot create resource "trainingsessions"', "bind the chart's Role"),
        ("exceeded quota: q, requested: count/trainingsessions=1", "end other sessions"),
        ("unable to create new content in namespace a because it is being terminated", None),
        ("admission webhook denied the request: label it", None),
    ],
)
def test_a_rejection_says_what_to_do_unless_kubernetes_does(
    explanation: str, remedy: str | None
) -> None:
    error = wire_error(rejected(403, explanation))

    before, _, after = error.message.partition(explanation)
    assert error.status == 503
    assert "403" in before
    assert after.startswith(f"; {remedy}") if remedy is not None else after == ""


@pytest.mark.parametrize("status", [400, 422])
def test_a_session_with_an_invalid_field_is_the_clients_error(status: int) -> None:
    error = wire_error(rejected(status, "spec.loraRank: Invalid value: 0" + " and more" * 100))

    assert (error.status, error.category) == (400, "user")
    assert error.message.endswith("and more")


def test_any_other_error_is_reported_as_it_is() -> None:
    error = wire_error(Expired("the list took too long"))

    assert (error.status, error.message) == (503, "the list took too long")

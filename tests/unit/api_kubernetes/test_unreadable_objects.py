"""Objects that this version of the server cannot read."""

from tinkercloud_api.providers.cluster.session_status import read_session, readable
from tinkercloud_testing.resources.sessions import a_session_manifest


def test_an_object_that_this_version_cannot_read_is_left_out() -> None:
    added = {"uid": "u", "resourceVersion": "1", "generation": 1, "creationTimestamp": "2026"}
    readable_one, later = (
        a_session_manifest(name, **spec) for name, spec in (("one", {}), ("two", {"role": "Judge"}))
    )
    for manifest in (readable_one, later):
        manifest["metadata"].update(added)
    read = readable(read_session)

    found = read(readable_one)

    assert found is not None
    assert found.name == "one"
    assert read(later) is None

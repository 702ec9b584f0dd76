"""Files are encrypted for all recipients, and keys that are none are rejected."""

import pyrage
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.checkpoints.encryption import encrypted, parse_recipients

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 4000}


def ssh_keys(private: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey) -> tuple[str, object]:
    """Return the public key as ssh-keygen writes it, and the identity."""
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    secret = private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return f"{public} me@laptop\n", pyrage.ssh.Identity.from_buffer(secret)


def test_each_recipient_alone_can_decrypt_every_file() -> None:
    own = [pyrage.x25519.Identity.generate() for _ in range(2)]
    ed_key, ed_identity = ssh_keys(ed25519.Ed25519PrivateKey.generate())
    rsa_key, rsa_identity = ssh_keys(rsa.generate_private_key(65537, 2048))
    keys = [*(str(each.to_public()) for each in own), ed_key, rsa_key]

    files = encrypted(lambda: dict(FILES), parse_recipients(keys))

    assert set(files) == {f"{name}.age" for name in FILES}
    for identity in (*own, ed_identity, rsa_identity):
        for name, content in FILES.items():
            assert pyrage.decrypt(files[f"{name}.age"], [identity]) == content
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(files["adapter_config.json.age"], [pyrage.x25519.Identity.generate()])


@pytest.mark.parametrize("key", ["", "age1x", "ssh-ed25519 AAAA", "ssh-dss AAAA", "nonsense"])
def test_a_text_that_is_no_public_key_is_rejected_by_position(key: str) -> None:
    good = str(pyrage.x25519.Identity.generate().to_public())

    with pytest.raises(InvalidRequest, match=r"age_encryption_recipients\.1: is not a public key"):
        parse_recipients([good, key])


def test_a_secret_key_is_rejected_and_not_repeated() -> None:
    secret = str(pyrage.x25519.Identity.generate())

    with pytest.raises(InvalidRequest, match="is a secret key") as error:
        parse_recipients([secret])

    assert secret[20:] not in error.value.message

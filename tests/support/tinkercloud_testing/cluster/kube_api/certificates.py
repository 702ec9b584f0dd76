"""The certificate authority of a test cluster, and the kubeconfig files of its users."""

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """The files of a certificate and its key, both PEM."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """Signs certificates that are valid for a day; all files are in one folder."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    name: x509.Name

    @property
    def certificate(self) -> Path:
        """The path of its own certificate."""
        return self.folder / "ca.crt"

    @classmethod
    def create(cls, folder: Path) -> "Authority":
        """Create an authority with its files in a folder."""
        folder.mkdir(mode=0o700, parents=True)
        authority = cls(
            folder, ec.generate_private_key(ec.SECP256R1()), _name("test-cluster-ca", [])
        )
        builder = _builder(authority.name, authority.key.public_key(), authority.name)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        signed = builder.sign(authority.key, hashes.SHA256())
        authority.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return authority

    def issue(
        self, user: str, *, groups: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> Certificate:
        """Sign a client certificate that is also a server certificate for these hosts."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = _builder(_name(user, groups), key.public_key(), self.name)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if hosts:
            alternatives = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(alternatives, critical=False)
        stem = self.folder / user.replace(":", "-")
        issued = Certificate(stem.with_suffix(".crt"), stem.with_suffix(".key"))
        signed = builder.sign(self.key, hashes.SHA256())
        issued.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        write_key(key, issued.key)
        return issued

    def kubeconfig(self, server: str, user: str, *, groups: Sequence[str] = ()) -> Path:
        """Issue a certificate for a user and write a kubeconfig with it."""
        issued = self.issue(user, groups=groups)
        credentials = {
            "client-certificate-data": _encoded(issued.certificate),
            "client-key-data": _encoded(issued.key),
        }
        path = issued.certificate.with_suffix(".kubeconfig")
        write_kubeconfig(path, server, _encoded(self.certificate), credentials)
        return path


def write_kubeconfig(path: Path, server: str, authority: str, credentials: dict[str, str]) -> None:
    """Write a kubeconfig with one cluster and one user.

    Args:
        path: The path of the file.
        server: URL of the API server.
        authority: Certificate of its authority, base64 of PEM.
        credentials: The user's entry: certificate and key, or a token.
    """
    cluster = {"server": server, "certificate-authority-data": authority}
    context = {"cluster": "test", "user": "test"}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": credentials}],
        "contexts": [{"name": "test", "context": context}],
        "current-context": "test",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(content))


def write_key(key: ec.EllipticCurvePrivateKey, path: Path) -> None:
    """Write a private key as PEM, readable by its owner only."""
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )


def new_key(path: Path) -> Path:
    """Write a new private key and return its path."""
    write_key(ec.generate_private_key(ec.SECP256R1()), path)
    return path


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, issuer: x509.Name
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + _LIFETIME)
    )


def _name(user: str, groups: Sequence[str]) -> x509.Name:
    organisations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organisations, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()

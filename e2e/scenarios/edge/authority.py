"""An authority that issues certificates for servers and for clients, as a Secret's files have them.

Knows nothing of who trusts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LIFE = timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, PEM; `serial` tells it from another."""

    certificate: str
    key: str
    serial: int


class Authority:
    """A new one, which nobody knows yet."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        public = self._key.public_key()
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(public)
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        made = (
            _begun(self._name, self._name, public)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = _pem(made)

    def issue(self, name: str) -> Issued:
        """One for a server of this name, or for a client that calls itself so."""
        key = ec.generate_private_key(ec.SECP256R1())
        identifier = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier)
        made = (
            _begun(_name(name), self._name, key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Issued(_pem(made), secret.decode(), made.serial_number)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _begun(name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    begun = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key)
    begun = begun.serial_number(x509.random_serial_number())
    return begun.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + _LIFE)


def _pem(made: x509.Certificate) -> str:
    return made.public_bytes(serialization.Encoding.PEM).decode()

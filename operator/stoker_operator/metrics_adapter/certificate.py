"""The custom metrics API's certificate: made, read back, and when it is time for the next one.

Invariants: pure but for the key's randomness; a certificate is its own authority, good for one host and for nothing but
serving; what clients are to trust (`bundle`) holds the one before for as long as that is valid, so that a renewal cuts
nobody off, in whatever order replicas and API servers learn of it.
Knows nothing of Secrets, of who serves with it and of who trusts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CERTIFICATE, KEY, BUNDLE = "tls.crt", "tls.key", "ca.crt"
LIFE = timedelta(days=365)
# Clocks of nodes differ a little.
_EARLIER = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its key, and what whoever verifies it is to trust; all PEM."""

    certificate: bytes
    key: bytes
    bundle: bytes


def from_files(files: Mapping[str, bytes]) -> Pair | None:
    """The pair that a Secret's files hold; None when one is missing. Without ca.crt it vouches for itself."""
    certificate, key = files.get(CERTIFICATE, b""), files.get(KEY, b"")
    return Pair(certificate, key, files.get(BUNDLE) or certificate) if certificate and key else None


def issue(host: str, now: datetime, before: Pair | None = None, life: timedelta = LIFE) -> Pair:
    """A new pair for `host`; clients go on trusting `before` while it is valid. `now` is aware, UTC."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # Each its own name: OpenSSL looks for the issuer by name alone, and would take the one before for it.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"stoker-operator-{serial:x}"[:64])])
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    text = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    still = before is not None and (_loaded(before.certificate) or certificate).not_valid_after_utc > now
    return Pair(text, secret, text + (before.certificate if before is not None and still else b""))


def is_due(pair: Pair, host: str, now: datetime) -> bool:
    """Whether the next certificate is to be made: a third of this one's life is left, or it is no good for `host`."""
    found = _loaded(pair.certificate)
    if found is None:
        return True
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return True
    if host not in names.get_values_for_type(x509.DNSName):
        return True
    return found.not_valid_after_utc - now < (found.not_valid_after_utc - found.not_valid_before_utc) / 3


def _loaded(text: bytes) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(text)
    except ValueError:
        return None

"""Who may ask an object store: checks signatures of AWS (version 4), Azure's SharedKey and Google's service accounts.

Written from the clouds' documents, apart from the clients under test, so that the two must agree.

Invariants: standard library only.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, unquote

_GOOGLE_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def sha256(key: bytes, text: str) -> bytes:
    """HMAC-SHA-256."""
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def aws_key_and_region(authorization: str) -> tuple[str, str]:
    """The access key and the region of an AWS4-HMAC-SHA256 header."""
    key, _, region, *_ = _fields(authorization)["Credential"].split("/")
    return key, region


def aws_signature_holds(secret: str, method: str, target: str, headers: Mapping[str, str]) -> bool:
    """Whether the request was signed with `secret` for S3. `headers` have lower-case names."""
    fields = _fields(headers["authorization"])
    _, day, region, service, _ = fields["Credential"].split("/")
    path, _, query = target.partition("?")
    pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in parse_qsl(query, keep_blank_values=True))
    names = fields["SignedHeaders"].split(";")
    canonical = "\n".join(
        [
            method,
            quote(unquote(path), safe="/-_.~"),
            "&".join(f"{key}={value}" for key, value in pairs),
            *(f"{name}:{' '.join(headers[name].split())}" for name in names),
            "",
            fields["SignedHeaders"],
            headers["x-amz-content-sha256"],
        ]
    )
    scope = f"{day}/{region}/{service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{digest}"
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, "aws4_request"):
        key = sha256(key, part)
    return hmac.compare_digest(sha256(key, to_sign).hex(), fields["Signature"])


def azure_signature_holds(account: str, secret: str, method: str, target: str, headers: Mapping[str, str]) -> bool:
    """Whether the request was signed with an account's key, which is `secret` in base64."""
    path, _, query = target.partition("?")
    length = headers.get("content-length", "")
    standard = ["content-encoding", "content-language", "", "content-md5", "content-type", "date", "if-modified-since"]
    standard += ["if-match", "if-none-match", "if-unmodified-since", "range"]
    values = [headers.get(name, "") if name else ("" if length == "0" else length) for name in standard]
    custom = sorted(f"{name}:{value.strip()}" for name, value in headers.items() if name.startswith("x-ms-"))
    pairs = sorted(parse_qsl(query, keep_blank_values=True))
    resource = [f"/{account}{path}", *(f"{key.lower()}:{value}" for key, value in pairs)]
    to_sign = "\n".join([method, *values, *custom, *resource])
    found = base64.b64encode(sha256(base64.b64decode(secret), to_sign)).decode()
    return hmac.compare_digest(f"SharedKey {account}:{found}", headers["authorization"])


def google_signature_holds(accounts: Mapping[str, tuple[int, int]], bearer: str) -> bool:
    """Whether a service account signed this bearer, a JWT by RS256, for itself, and its hour has come and is not over.

    `accounts`: the account's address → the public key's modulus and exponent.
    """
    try:
        head, claims = (json.loads(_decoded(part)) for part in bearer.split(".")[:2])
        signed, _, signature = bearer.rpartition(".")
        modulus, exponent = accounts[claims["iss"]]
        found = pow(int.from_bytes(_decoded(signature)), exponent, modulus)
    except (ValueError, KeyError, TypeError):
        return False
    length = (modulus.bit_length() + 7) // 8
    # PKCS #1, version 1.5: padding, the name of SHA-256, the digest.
    name = bytes.fromhex("3031300d060960864801650304020105000420")
    digest = name + hashlib.sha256(signed.encode()).digest()
    right = b"\0\1" + b"\xff" * (length - len(digest) - 3) + b"\0" + digest
    timely = claims["iat"] - 60 <= time.time() < claims["exp"] <= claims["iat"] + 3600
    known = (head["alg"], claims["sub"], claims["scope"]) == ("RS256", claims["iss"], _GOOGLE_SCOPE)
    return bool(known and timely and hmac.compare_digest(found.to_bytes(length), right))


def _decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def _fields(authorization: str) -> dict[str, str]:
    parts = [part.strip().partition("=") for part in authorization.partition(" ")[2].split(",")]
    return {name: value for name, _, value in parts}

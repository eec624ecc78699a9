"""What a refusal of an object store means, and what to do about it.

The library puts an answer's status and body into its text; its classes tell less. Only the status, the store's own code
and a region are read from there: the rest names keys and requests.

Invariants: no message holds a query, a header or a body of an answer; each names bucket or object, and the fix.
Knows nothing of what was asked.
"""

from __future__ import annotations

import re

from obstore.exceptions import InvalidPathError

from stoker_runtime.fetch.errors import (
    BadRequest,
    FetchError,
    FetchFailed,
    HubUnreachable,
    ModelNotFound,
    TokenRejected,
)
from stoker_runtime.fetch.source import Transient
from stoker_runtime.fetch.stores.client import Bucket
from stoker_runtime.process.log import escaped

# How the library tells that it asked for credentials, or had half of them. It only reads from a bucket, by GET.
_IDENTITY = re.compile(
    r"performing (?:POST|PUT) |/latest/meta-data|/computeMetadata/|/metadata/identity|token (?:request|file)|"
    r"credential|Missing (?:AccessKeyId|SecretAccessKey)"
)
_NEEDS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or an identity that may read it "
    "(s3:ListBucket, s3:GetObject); for a public bucket AWS_SKIP_SIGNATURE=true",
    "gs": "GOOGLE_SERVICE_ACCOUNT_KEY, or an identity that may read it (storage.objects.list, storage.objects.get); "
    "for a public bucket GOOGLE_SKIP_SIGNATURE=true",
    "az": "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or an identity that may read it (Storage Blob Data "
    "Reader); for a public container AZURE_SKIP_SIGNATURE=true",
}
_CODES = {
    "InvalidAccessKeyId": "The access key is not known there.",
    "SignatureDoesNotMatch": "The secret key does not belong to the access key.",
    "ExpiredToken": "The credentials have expired.",
    "InvalidToken": "The session's token does not belong to the keys.",
    "RequestTimeTooSkewed": "The clock of this machine is wrong.",
    "AuthenticationFailed": "The account's key, or the SAS token, is wrong or has expired.",
}


def refused(bucket: Bucket, what: str, error: Exception) -> FetchError | Transient:
    """The error to raise for the library's. `what` is the object or the URI that was asked for."""
    text = str(error)
    if isinstance(error, InvalidPathError):
        return _no_path(what, text)
    status, code = _status(text), _between("Code", text)
    if _region_wrong(text, code):
        return _other_region(bucket, _between("Region", text))
    if _IDENTITY.search(text.partition("\n")[0].partition(" - ")[0]):
        return _no_identity(bucket, what, status, text)
    if status == 404:
        if code in ("NoSuchKey", "BlobNotFound"):
            return ModelNotFound(f"{what} does not exist at {bucket.where} (404).")
        return ModelNotFound(f"{what}: there is no {bucket.kind} {bucket.name!r} at {bucket.where} (404).")
    # Amazon tells of these with 400.
    if status in (401, 403) or code in ("ExpiredToken", "InvalidToken"):
        return TokenRejected(f"{what}: {bucket.where} refused access ({_said(status, code)}). {_access(bucket, code)}")
    if status == 412:
        return FetchFailed(f"{what} changed while it was fetched; the next run takes what is there then.")
    if status in (408, 425, 429) or status >= 500:
        return Transient(FetchFailed(f"{what}: {bucket.where} answered with status {_said(status, code)}."))
    if status:
        return FetchFailed(f"{what}: {bucket.where} answered with status {_said(status, code)}.")
    return Transient(HubUnreachable(f"{what}: {bucket.where} cannot be reached: {_cause(text)}."))


def _no_path(what: str, text: str) -> FetchError:
    """A listing that holds a name which the library does not take."""
    named = re.search(r'[Pp]ath:? ("(?:[^"\\]|\\.)*")', text)
    name = named[1] if named else "one"
    return BadRequest(
        f"{what} names the file {escaped(name)}, which is no plain relative path; remove it there, or name a longer "
        "prefix."
    )


def _access(bucket: Bucket, code: str) -> str:
    known = _CODES.get(code, "")
    return f"{known} Check what is set.".strip() if known else f"It needs {_NEEDS[bucket.scheme]}."


def _no_identity(bucket: Bucket, what: str, status: int, text: str) -> FetchError | Transient:
    code = _between("Code", text) or _told_by_entra(text)
    said = f" (asking this machine's identity was answered with status {_said(status, code)})" if status else ""
    if status == 429 or status >= 500:
        return Transient(HubUnreachable(f"{what}: this machine's identity cannot be had now{said}."))
    if "BadScheme" in text:
        return BadRequest(f"{what}: the address of the identity's service is no https:// address; correct it.")
    if not status and "performing POST " in text:
        # Only what was told where to ask asks so; an instance's own address answers nobody elsewhere.
        return Transient(HubUnreachable(f"{what}: the identity's service cannot be reached: {_cause(text)}."))
    if "token file" in text.partition("\n")[0]:
        said = " (the file with this workload's token cannot be read)"
    return TokenRejected(f"{what}: no credentials were found{said}. It needs {_NEEDS[bucket.scheme]}.")


def _region_wrong(text: str, code: str) -> bool:
    return "redirect without LOCATION" in text or code in ("AuthorizationHeaderMalformed", "PermanentRedirect")


def _other_region(bucket: Bucket, region: str) -> FetchError:
    right = f", in {region}" if region else ""
    name = f"AWS_REGION={region}" if region else "AWS_REGION to its region"
    return BadRequest(
        f"The {bucket.kind} {bucket.name!r} lies in another region than {bucket.region}{right}: set {name}, or give "
        f"that region's address as the endpoint (https://s3.{region or 'REGION'}.amazonaws.com)."
    )


def _status(text: str) -> int:
    match = re.search(r"status code: (\d{3})\b", text) or re.search(r"\bstatus: (\d{3})\b", text)
    return int(match[1]) if match else 0


def _between(tag: str, text: str) -> str:
    match = re.search(rf"<{tag}>([A-Za-z0-9-]{{1,64}})</{tag}>", text)
    return match[1] if match else ""


def _told_by_entra(text: str) -> str:
    match = re.search(r"\bAADSTS\d{1,9}\b", text)
    return match[0] if match else ""


def _said(status: int, code: str) -> str:
    return f"{status} {code}" if code else str(status)


def _cause(text: str) -> str:
    """The reason that stands deepest in the library's account of a failed connection."""
    found = re.findall(r'message: "([^"?]{1,120})"', text) or re.findall(r"kind: ([A-Z][A-Za-z]+)", text)
    return str(found[-1]) if found else "no answer"

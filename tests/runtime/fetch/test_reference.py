"""URIs: what each scheme means, and what is refused with which words."""

from __future__ import annotations

import pytest

from stoker_runtime.fetch.errors import BadRequest
from stoker_runtime.fetch.reference import parse, relative_path


@pytest.mark.parametrize(
    ("text", "scheme", "place", "file"),
    [
        ("hf://Qwen/Qwen2.5-7B-Instruct", "hf", "Qwen/Qwen2.5-7B-Instruct", ""),
        ("modelscope://Qwen/Qwen3-0.6B", "modelscope", "Qwen/Qwen3-0.6B", ""),
        ("hf://org/repo/sub/model.Q4_1.gguf", "hf", "org/repo", "sub/model.Q4_1.gguf"),
        ("https://host/dir/m.gguf?sig=1", "https", "https://host/dir/m.gguf?sig=1", "m.gguf"),
        ("file:///models/x", "file", "/models/x", ""),
        ("pvc://claim", "pvc", "claim", ""),
        ("pvc://claim/a/b/", "pvc", "claim/a/b", ""),
        ("s3://a.bucket-9/team/m-1/", "s3", "a.bucket-9/team/m-1", ""),
        ("gs://bucket", "gs", "bucket", ""),
        ("az://$web/deep/m.gguf", "az", "$web/deep", "m.gguf"),
        ("oci://reg.io:5000/team/m_1:v1.2", "oci", "reg.io:5000/team/m_1:v1.2", ""),
    ],
)
def test_parses(text: str, scheme: str, place: str, file: str) -> None:
    reference = parse(text)
    assert (reference.scheme, reference.place, reference.file) == (scheme, place, file)


def test_the_text_for_a_status_holds_no_signature() -> None:
    assert parse("https://host/m.gguf?X-Signature=secret").text == "https://host/m.gguf"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Qwen/Qwen2.5", "no model URI"),
        ("hf://", "no model URI"),
        ("hf://only-org", "names no repository"),
        ("hf://org/repo@main", "--revision"),
        ("hf://../repo", "names no repository"),
        ("hf://org/repo/../../etc/passwd", "no plain relative path"),
        ("hf://org/re po", "no model URI"),
        ("file://relative", "three slashes"),
        ("https://user:secret@host/file", "user name or password"),
        ("https://host/", "names no file"),
        ("pvc://Claim_1/x", "no PersistentVolumeClaim"),
        ("pvc://claim/../other", "no plain relative path"),
        ("s3:///prefix", "names no bucket; write it as s3://BUCKET/PREFIX"),
        ("az://-x/prefix", "names no container"),
        ("s3://bucket/../other", "no plain relative path"),
        ("s3://bucket/m.gguf?X-Amz-Signature=secret", "followed by a query"),
        ("oci://registry", "names no artifact; write it as oci://REGISTRY/NAME:TAG"),
        ("oci://registry/name:v1@sha256:12", "names no artifact"),
        ("oci://registry/../x", "names no artifact"),
        ("modelscope://only-org", "write it as modelscope://ORG/REPO"),
        ("ftp://host/file", "not known"),
    ],
)
def test_refuses(text: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as failure:
        parse(text)
    assert "secret" not in failure.value.message


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "a/../b", "a\\b", "a\0b", "a//b", "stoker-manifest.json", ".stoker/x"]
)
def test_a_listing_cannot_name_a_file_outside_the_destination(name: str) -> None:
    with pytest.raises(BadRequest):
        relative_path(name, "listing")

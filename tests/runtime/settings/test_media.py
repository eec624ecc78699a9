"""The flags of media: numbers of images in vLLM's spellings, and hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_runtime.settings.parse import read


@pytest.mark.parametrize(
    ("spelled", "limit"),
    [
        ("image=3", 3),
        ("video=2,image=0", 0),
        ("video=2", None),
        ('{"image":7}', 7),
        ('{"image":{"count":5,"width":99},"video":1}', 5),
        ('{"image":{"width":99}}', None),
        ("{}", None),
    ],
)
def test_the_limit_of_images(spelled: str, limit: int | None) -> None:
    config, said = read(["m", "--limit-mm-per-prompt", spelled], {})
    assert config.image_limit == limit
    assert not said
    assert read(["m"], {"STOKER_LIMIT_MM_PER_PROMPT": spelled})[0].image_limit == limit


def test_hosts_and_files(tmp_path: Path) -> None:
    given = ["m", "--allowed-media-domains", "a.example", "b.example", "--language-model-only"]
    config, said = read(given, {})
    assert config.allowed_media_domains == ("a.example", "b.example")
    assert config.engine.language_model_only
    assert not said
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nlimit-mm-per-prompt: {image: 3}\nallowed-media-domains: [c.example, d.example]\n")
    config, _ = read(["--config", str(file)], {"STOKER_ALLOWED_MEDIA_DOMAINS": "x.example,y.example"})
    assert config.image_limit == 3
    assert config.allowed_media_domains == ("x.example", "y.example")

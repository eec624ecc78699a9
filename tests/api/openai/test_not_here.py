"""Sound and pictures, asked for by the `openai` package: a 501 that says so, never a hang or a 404."""

from __future__ import annotations

import io
from collections.abc import Callable

import openai
import pytest
from api_server import Running

ASKED: dict[str, Callable[[openai.OpenAI], object]] = {
    "speech": lambda client: client.audio.speech.create(model="m", voice="alloy", input="hi"),
    "transcription": lambda client: client.audio.transcriptions.create(model="m", file=("a.wav", io.BytesIO(b"RIFF"))),
    "translation": lambda client: client.audio.translations.create(model="m", file=("a.wav", io.BytesIO(b"RIFF"))),
    "image": lambda client: client.images.generate(model="m", prompt="a fox"),
    "edit": lambda client: client.images.edit(model="m", image=("a.png", io.BytesIO(b"x")), prompt="a fox"),
    "variation": lambda client: client.images.create_variation(model="m", image=("a.png", io.BytesIO(b"x"))),
}


# The package itself calls some of them outdated.
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
@pytest.mark.parametrize("asked", ASKED)
def test_it_is_refused_by_name(server: Running, asked: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            ASKED[asked](client)
        assert caught.value.status_code == 501
        assert caught.value.type == "not_implemented_error"
        assert caught.value.code in ("audio_not_supported", "images_not_supported")
        assert client.models.list().data[0].id == "byte-model", "the connection is of use afterwards"

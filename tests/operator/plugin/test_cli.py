"""plugin/cli.py: verbs that need no cluster, what is refused, and completion."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.generate import reasons

from stoker_operator.plugin import cli
from stoker_operator.plugin.advice import is_covered
from stoker_operator.plugin.completion import candidates

ROOT = Path(__file__).resolve().parents[3]
PRODUCTION = str(ROOT / "crds" / "examples" / "production.yaml")
Files = Callable[..., str]


@pytest.fixture
def file(tmp_path: Path, raw: Callable[..., dict[str, Any]]) -> Files:
    """A manifest of a service on a file."""

    def write(**spec: Any) -> str:
        path = tmp_path / "service.yaml"
        document = raw("some", **spec)
        document["metadata"] = {"name": "some"}
        path.write_text(yaml.safe_dump(document))
        return str(path)

    return write


def test_the_scripts_of_the_package_are_there() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name in ("kubectl-stoker", "kubectl_complete-stoker"):
        module, _, function = scripts[name].partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_render_writes_what_the_operator_would(file: Files, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(autoscaling={"max": 3}, endpoint={"ingress": {"host": "a.example"}})
    assert cli.main(["render", "-f", path, "--", "--runtime-image", "registry.example/some:9"]) == 0
    written = list(yaml.safe_load_all(capsys.readouterr().out))
    kinds = [item["kind"] for item in written]
    assert kinds.index("PersistentVolumeClaim") < kinds.index("Job") < kinds.index("Deployment")
    assert {"Service", "NetworkPolicy", "Ingress", "HorizontalPodAutoscaler", "PodMonitor"} <= set(kinds)
    [deployment] = [item for item in written if item["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "registry.example/some:9"


def test_render_and_fit_of_several_engines_in_a_pod(file: Files, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(resources={"gpus": 6, "gpuProducts": ["NVIDIA-L4"]}, parallelism={"tensor": 2, "data": 3})
    assert cli.main(["render", "-f", path, "--weights", "15Gi"]) == 0
    written = {item["kind"]: item for item in yaml.safe_load_all(capsys.readouterr().out)}
    [engine] = written["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert engine["args"][engine["args"].index("--data-parallel-size") + 1] == "3"
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "6"
    assert cli.main(["fit", "-f", path, "--weights", "15Gi"]) == 0
    assert "on each of 6 GPUs of 3 engines weights 7.5" in capsys.readouterr().out


def test_render_of_a_model_that_is_served_where_it_lies(file: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "-f", file(model={"uri": "pvc://weights/dir"})]) == 0
    kinds = [item["kind"] for item in yaml.safe_load_all(capsys.readouterr().out)]
    assert "Deployment" in kinds
    assert "PersistentVolumeClaim" not in kinds


def test_render_says_when_there_would_be_no_pods(file: Files, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(resources={"gpus": 1, "gpuProducts": ["NVIDIA-L4"]})
    assert cli.main(["render", "-f", path, "--weights", "61Gi"]) == 1
    assert "it would get no pods: The model does not fit: weights 61.0" in capsys.readouterr().err


def test_fit_of_a_presets_model_and_of_one_that_is_told(file: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "-f", PRODUCTION]) == 0
    assert "weights 8.1 + KV cache of 32768 tokens 0.9" in capsys.readouterr().out
    path = file(resources={"gpus": 1, "gpuProducts": ["NVIDIA-L4"]})
    facts = ["--weights", "23Gi", "--shape", "layers=10,kvHeads=2,headDim=64,maxContext=4096"]
    assert cli.main(["fit", "-f", path, *facts]) == 1
    said = capsys.readouterr().out
    assert "The model does not fit: weights 23.0" in said
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith(("NVIDIA", "Tesla"))}
    assert rows["NVIDIA-L4"].endswith("too large")
    assert rows["NVIDIA-L40S"].endswith("fits")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fit", "-f", "FILE"], "Give --weights and --shape"),
        (["fit", "-f", "FILE", "--weights", "much"], "is not a quantity"),
        (["fit", "-f", "FILE", "--shape", "layers=2"], "must name layers, kvHeads, headDim, maxContext"),
        (["fit"], "give the name of a service, or -f FILE"),
        (["render", "-f", "/nowhere.yaml"], "/nowhere.yaml: No such file"),
        (["render", "-f", "FILE", "--", "--workers", "0"], "workers is 0"),
        (["presets", "nothing"], "there is no preset 'nothing'"),
        (["status", "some", "--up", "--data", "/nowhere"], "no `stoker up` on this machine runs 'some'"),
        (["rollback", "some", "--up"], "runs what its manifest says"),
    ],
)
def test_what_cannot_be_done_says_why(
    file: Files, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    path = file(model={"uri": "hf://nobody/knows"})
    assert cli.main([path if word == "FILE" else word for word in words]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["presets", "--up", "nothing"], ["presets", "nothing", "--up"]])
def test_a_name_may_stand_before_flags_or_after(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(words) == 1
    assert "there is no preset 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["presets", "a", "b"], ["chat", "a", "b", "--loud"], ["logs", "a", "--", "--x"]])
def test_what_belongs_nowhere_is_named(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert words[-1] in said or "hands nothing on" in said


def test_without_kubectl_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("KUBECTL", raising=False)
    assert cli.main(["status"]) == 1
    assert "kubectl is not on PATH" in capsys.readouterr().err


def test_a_field_that_is_none_is_named(file: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "-f", file(endpiont={})]) == 1
    assert "did you mean endpoint?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["st"], ["status"]),
        (["status", "b"], ["bar"]),
        (["--context=x", "chat", ""], ["bar", "foo"]),
        (["presets", "q"], ["quick"]),
        (["logs", "--fol"], ["--follow"]),
        (["status", "--nam"], ["--namespace"]),
        (["render", "-f", ""], []),
    ],
)
def test_completion(words: list[str], offered: list[str]) -> None:
    found, directive = candidates(cli.parser(), words, lambda _: ["foo", "bar"], lambda: ["quick", "slow"])
    assert found == offered
    assert directive == (":0" if words[-2:-1] == ["-f"] else ":4")


def test_every_reason_of_ready_has_advice() -> None:
    ready = {each.reason for each in reasons.found() if each.condition == reasons.READY}
    assert len(ready) > 20
    assert {reason for reason in ready if not is_covered(reason)} == set()

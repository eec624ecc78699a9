"""Read the settings of `stoker serve` from flags, `STOKER_*` variables and a config file, into a `ServerConfig`.

Precedence: flag over variable over file over default. Invariants: an unknown name is an error that gives the nearest
known one, a bad value one that names the key and what is allowed; an API key is never part of a message.
Knows nothing of what settings mean; see flags.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker_runtime.api.http.keys import read_keys
from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.nodes import SECRET_VARIABLE
from stoker_runtime.settings import vllm_flags
from stoker_runtime.settings.flag import PREFIX, Flag, variable
from stoker_runtime.settings.flags import ALIASES, BY_NAME, DEFAULTS, FLAGS, OPPOSITES, spell
from stoker_runtime.settings.values import BadValue, pair

log = logging.getLogger(__name__)

# Variables of other subcommands, and of the libraries; `stoker serve` leaves them alone.
OTHER_VARIABLES = (
    *("STOKER_FETCH_", "STOKER_OPERATOR_", "STOKER_KERNELS_", "STOKER_KERNEL_CACHE", "STOKER_AOT_DIR"),
    *("STOKER_K8S_", "STOKER_E2E_"),  # of the tests of a cluster
)
# What Kubernetes sets in every pod for a Service whose name begins with "stoker".
_SERVICE_LINK = re.compile(r"STOKER_(.+_)?(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*)")


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> ServerConfig:
    """The configuration; what was ignored is logged. Raises ConfigError naming the flag, variable or key at fault."""
    config, ignored = read(arguments, environment)
    for line in ignored:
        log.warning("%s", line)
    return config


def read(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[ServerConfig, list[str]]:
    """The configuration, and a line for each flag of vLLM's that was ignored. Raises ConfigError as parse does."""
    from_variables: dict[str, str] = {}
    from_arguments: dict[str, str] = {}
    ignored: dict[str, str] = {}
    given = _from_arguments(arguments, from_arguments)
    variables = _from_environment(environment, from_variables)
    path = _last(given, "config") or _last(variables, "config")
    settings = (_from_file(Path(path), ignored) if path else {}) | variables | given
    return build(settings), list((ignored | from_variables | from_arguments).values())


def build(settings: Mapping[str, Any]) -> ServerConfig:
    """A validated configuration from converted settings by flag name."""
    if "model" not in settings:
        raise ConfigError("No model is given; say `stoker serve MODEL`.", param="model")
    engine_fields = {field.name for field in dataclasses.fields(EngineConfig)}
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    for name, value in settings.items():
        field = BY_NAME[name].field
        if field:
            (engine if field in engine_fields else server)[field] = tuple(value) if BY_NAME[name].many else value
    try:
        config = ServerConfig(engine=EngineConfig(**engine), **server).validate()
    except ConfigError as error:
        raise _by_flag(error) from None
    if config.api_key_file:
        read_keys(Path(config.api_key_file))
    return config


def _by_flag(error: ConfigError) -> ConfigError:
    """The same error under the name that the user gave, where flag and field are called differently."""
    for flag in FLAGS:
        if flag.field and flag.field == error.param and flag.name.replace("-", "_") != flag.field:
            return ConfigError(error.message.replace(flag.field, flag.name, 1), param=flag.name)
    return error


def describe(config: ServerConfig) -> str:
    """The settings that are not at their default, for the log; secrets are counted, not shown."""
    parts = [config.engine.model]
    for flag in FLAGS:
        holder: Any = config.engine if hasattr(config.engine, flag.field) else config
        value: Any = getattr(holder, flag.field, None)
        if flag.name == "model" or value == DEFAULTS.get(flag.field):
            continue
        parts.append(f"{flag.name}={len(value) if flag.secret else spell(value)}")
    return " ".join(parts)


def _from_arguments(arguments: Sequence[str], ignored: dict[str, str]) -> dict[str, Any]:
    """Settings from the command line: `--flag value`, `--flag=value`, `--no-switch`, and the model by itself.

    What is said of flags of vLLM's that are ignored goes into `ignored` by their names; likewise below.
    """
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-") or argument == "-":
            if "model" in found:
                raise ConfigError(f"{argument!r} is too much; the model is {found['model']!r}.", param="model")
            found["model"] = argument
            continue
        spelled, equals, value = argument.partition("=")
        theirs, is_off = vllm_flags.find(spelled)
        if theirs:
            words = [value] if equals else vllm_flags.take_words(theirs, rest)
            _accept(theirs, spelled, words, ignored, negated=is_off)
            continue
        flag, negated = _find_flag(spelled)
        if flag.is_switch and not equals:
            found[flag.name] = not negated
            continue
        values = [value] if equals else _take_values(flag, rest)
        if not values:
            raise ConfigError(f"{spelled} needs a value: {flag.shown}.", param=flag.name)
        converted = [_convert(flag, spelled, each) for each in _split(flag, values)]
        found[flag.name] = [*found.get(flag.name, []), *converted] if flag.many else converted[0]
        if negated:
            raise ConfigError(f"{spelled} takes no value.", param=flag.name)
    return found


def _take_values(flag: Flag, rest: list[str]) -> list[str]:
    """The words that belong to `flag`: one, or all up to the next flag."""
    taken: list[str] = []
    while rest and (flag.words or not taken) and not rest[0].startswith("--"):
        taken.append(rest.pop(0))
    return taken


def _split(flag: Flag, values: Sequence[str]) -> Sequence[str]:
    """The values; for one that is a JSON list of texts, as vLLM writes `--allowed-origins`, its entries."""
    if not (flag.many and len(values) == 1 and values[0].startswith("[")):
        return values
    try:
        listed = json.loads(values[0])
    except ValueError:
        return values
    return listed if isinstance(listed, list) and all(isinstance(each, str) for each in listed) else values


def _accept(
    name: str, spelled: str, values: Sequence[str], ignored: dict[str, str], *, negated: bool = False
) -> None:
    """Check a flag of vLLM's that is no setting here, and note what is to be said of it."""
    if line := vllm_flags.accept(spelled, name, values, negated=negated):
        ignored[name] = line


def _find_flag(spelled: str) -> tuple[Flag, bool]:
    """The flag, and whether it is negated. Underscores count as dashes."""
    name = spelled.lstrip("-").replace("_", "-")
    name = ALIASES.get(name, name)
    if name in BY_NAME:
        return BY_NAME[name], False
    if name in OPPOSITES:
        return BY_NAME[OPPOSITES[name]], True
    plain = name.removeprefix("no-")
    if plain != name and plain in BY_NAME and BY_NAME[plain].is_switch:
        return BY_NAME[plain], True
    if instead := vllm_flags.hint(spelled, [flag.name for flag in FLAGS if flag.shown == "JSON"]):
        raise ConfigError(f"Unknown flag {spelled}{instead}.", param=spelled)
    known = (*BY_NAME, *ALIASES, *OPPOSITES, *vllm_flags.TAKEN)
    raise _unknown("flag", spelled, [f"--{each}" for each in known], f"--{name}")


def _from_environment(environment: Mapping[str, str], ignored: dict[str, str]) -> dict[str, Any]:
    """Settings from `STOKER_*` variables; the service links of Kubernetes are none."""
    variables = {flag.variable: flag for flag in FLAGS}
    found: dict[str, Any] = {}
    for name, ours in vllm_flags.VARIABLES.items():
        if name in environment and BY_NAME[ours].variable not in environment:
            found[ours] = _convert(BY_NAME[ours], name, environment[name])
    for name, value in environment.items():
        if not name.startswith(PREFIX) or name.startswith(OTHER_VARIABLES) or _is_service_link(name, value):
            continue
        if name == SECRET_VARIABLE:
            continue  # read where nodes meet, and never a part of what is logged
        theirs, _ = vllm_flags.find(name.removeprefix(PREFIX).lower())
        if theirs and variable(theirs) == name:
            _accept(theirs, name, [value], ignored)
            continue
        if name not in variables:
            raise _unknown("environment variable", name, variables, name)
        flag = variables[name]
        if flag.many:
            parts = _split(flag, [value])
            parts = value.split(",") if parts == [value] else parts
            # An empty secret is refused, not dropped: whoever sets one believes that it protects.
            found[flag.name] = [_convert(flag, name, part.strip()) for part in parts if part.strip() or flag.secret]
        else:
            found[flag.name] = _convert(flag, name, value)
    return found


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(name)) or (name.endswith("_PORT") and "://" in value)


def _from_file(path: Path, ignored: dict[str, str]) -> dict[str, Any]:
    """Settings from a TOML or YAML file, by the flags' names with dashes or underscores."""
    found: dict[str, Any] = {}
    for key, value in _read_file(path).items():
        name = str(key).replace("_", "-")
        if name == vllm_flags.find(name)[0]:
            words = [spell(each) for each in (value if isinstance(value, list) else [value])]
            _accept(name, f"{key} in {path}", words, ignored)
            continue
        if name not in BY_NAME or name == "config":
            raise _unknown(f"key in {path}", str(key), BY_NAME, name)
        flag = BY_NAME[name]
        values = value if isinstance(value, list) else [value]
        if isinstance(value, dict) and flag.convert is pair:
            values = [f"{op}={implementation}" for op, implementation in value.items()]
        converted = [_convert(flag, f"{key} in {path}", spell(each)) for each in values]
        if not flag.many and len(converted) != 1:
            raise ConfigError(f"{key} in {path} must be one value, not a list.", param=name)
        found[name] = converted if flag.many else converted[0]
    return found


def _read_file(path: Path) -> dict[Any, Any]:
    try:
        raw = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"The config file {path} cannot be read: {reason}.", param="config") from error
    if path.suffix == ".toml":
        try:
            return tomllib.loads(raw)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}.", param="config") from error
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            values = yaml.safe_load(raw)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}.", param="config") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold keys and values.", param="config")
        return values
    raise ConfigError(f"The config file {path} must end in .toml, .yaml or .yml.", param="config")


def _convert(flag: Flag, spelled: str, value: str) -> Any:
    try:
        return flag.convert(vllm_flags.SPELLINGS.get(flag.name, {}).get(value, value))
    except BadValue as error:
        quoted = "its value" if flag.secret else repr(value)
        raise ConfigError(f"{spelled}: {quoted} is not allowed; it must be {error}.", param=flag.name) from None


def _last(settings: Mapping[str, Any], name: str) -> str:
    return str(settings.get(name, ""))


def _unknown(kind: str, spelled: str, known: Iterable[str], key: str) -> ConfigError:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "."
    return ConfigError(f"Unknown {kind} {spelled}{hint}", param=spelled)

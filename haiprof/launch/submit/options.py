"""A submitted job's haiprof options, merged from all sources, as text for a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from haiprof.base.options import (
    OPTIONS,
    merge_options,
    option_spec,
    options_from_environment,
    options_from_pyproject,
    parse_dotted,
    parse_value,
    safe_name,
)


def resolve_options(
    dotted: Sequence[str],
    given: Mapping[str, str | None],
    environ: Mapping[str, str],
    *,
    program: str,
    pyproject: Path = Path("pyproject.toml"),
) -> tuple[dict[str, str], Path]:
    """What the job's command line says, so that nothing has to travel beside it."""
    texts = _of_environment(environ)
    for word in dotted:
        parse_dotted(word)
        name, _, text = word.partition("=")
        texts[_canonical(name.removeprefix("profile."))] = text
    texts |= {name: text for name, text in given.items() if text is not None}
    options = merge_options(
        options_from_pyproject(pyproject),
        options_from_environment(environ),
        dict(parse_value(name, text, origin=f"--{name}") for name, text in texts.items()),
    )
    name = options.name or Path(program).name.removesuffix(".py")
    texts |= {"name": safe_name(name), "log-dir": options.address or str(options.log_dir)}
    return texts, options.log_dir


def _of_environment(environ: Mapping[str, str]) -> dict[str, str]:
    texts = {spec.name: environ[spec.env] for spec in OPTIONS if environ.get(spec.env)}
    parsed = options_from_environment(environ)
    return texts | {k: f"{v:g}" for k, v in parsed.items() if k.startswith("interval.")}


def _canonical(name: str) -> str:
    spec = option_spec(name)
    return name if spec is None else spec.name

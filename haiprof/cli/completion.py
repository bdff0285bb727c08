"""`haiprof completion SHELL`: what bash, zsh and fish complete after `haiprof`."""

from __future__ import annotations

from haiprof.base.options import OPTIONS
from haiprof.cli.names import COMMANDS, WORDS

SHELLS = ("bash", "zsh", "fish")
_COMMON = ("--json", "--log-dir", "--help")

_BASH = """\
_haiprof() {
    local word="${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 && $word != -* ]]; then
        COMPREPLY=($(compgen -W "@WORDS@" -- "$word") $(compgen -f -- "$word"))
    elif [[ " @WORDS@ " == *" ${COMP_WORDS[1]} "* && $word == -* ]]; then
        COMPREPLY=($(compgen -W "@COMMON@" -- "$word"))
    elif [[ ${COMP_WORDS[1]} == help ]]; then
        COMPREPLY=($(compgen -W "@WORDS@" -- "$word"))
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "@OPTIONS@" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}
complete -o filenames -F _haiprof haiprof
"""
_ZSH = """\
autoload -U +X bashcompinit && bashcompinit
"""


def completion_script(shell: str) -> str:
    """The script that a shell evaluates.

    Args:
        shell: One of `SHELLS`.
    """
    if shell == "fish":
        return _fish_script()
    filled = _BASH
    for mark, words in (
        ("@WORDS@", WORDS), ("@COMMON@", _COMMON), ("@OPTIONS@", _options())
    ):  # fmt: skip
        filled = filled.replace(mark, " ".join(words))
    return filled if shell == "bash" else _ZSH + filled


def _options() -> list[str]:
    return [f"--{spec.name}" for spec in OPTIONS]


def _fish_script() -> str:
    first = "__fish_use_subcommand"
    lines = [
        f"complete -c haiprof -n {first} -a {name} -d {_quote(line.split(': ', 1)[-1])}"
        for name, line in COMMANDS.items()
    ]
    lines += [f"complete -c haiprof -n {first} -l {spec.name}" for spec in OPTIONS]
    lines += [f"complete -c haiprof -n 'not {first}' -l {word[2:]}" for word in _COMMON]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

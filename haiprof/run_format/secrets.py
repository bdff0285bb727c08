"""One rule set for credentials: what is masked before a command line or a variable is recorded.

A name decides first (`--api-key X`, `WANDB_API_KEY=x`, `?token=x`), then the form of a value:
tokens of well-known services, user and password in a URL, addresses that are a secret themselves
(webhooks), `Authorization:` headers. In doubt a value is masked, except where training scripts use
the same words: `--pad-token`, `--max-tokens`. What cannot be told apart from other text stays:
`-pPASSWORD`, a bare 40-digit hexadecimal key.

Source: the keyword and prefix rules of gitleaks (config/gitleaks.toml) and detect-secrets
(plugins/keyword.py and one plugin per service), without their entropy search over all text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from haiprof.base.version import read_data

MASK = "***"

_DATA = read_data("run_format/secrets.json")
_SECRET, _LIKELY, _POSSIBLE, _KEY_OF, _OF_MODELS, _ABOUT, _SWITCHES, _PLAIN = (
    frozenset[str](_DATA[name]) for name in (
        "secret", "likely", "possible", "key_of", "of_models", "about", "switches", "plain")
)  # fmt: skip
"""Parts of names, in lower case. A value under one of `_SECRET` is masked whatever it is. By the
last part: `_LIKELY` hold a secret unless the value is plainly a number, a switch, a path, and so
does `key` behind one of `_KEY_OF`; not so `token` and `pass` of a model, behind one of
`_OF_MODELS`; `_POSSIBLE` may hold one: only values that look random are masked; `_ABOUT` speak
about a secret without holding it. `_SWITCHES` begin the name of a switch; `_PLAIN` are values that
are none."""
_SECRET_ENDS = tuple[str, ...](_DATA["secret_ends"])
_TOKENS: Mapping[str, int] = _DATA["tokens"]
"""How tokens of services begin, and how many characters follow at least."""

_PARTS = re.compile(r"[A-Z]+(?=[A-Z][a-z]|[\d_\-.]|\Z)|[A-Z]?[a-z]+|[A-Z]+")
_RANDOM = re.compile(r"[A-Za-z0-9]{16,}")
_RUN = re.compile(r"[A-Za-z0-9][\w.\-]{13,}")
# Eight digits are more than a vocabulary has tokens, and as many as a numeric secret has.
_NUMBER = re.compile(r"[-+]?(?:\d{1,7}|(?=\d*\.)[0-9.]{1,8})(?:[eE][-+]?\d{1,3})?")
_OPTION = re.compile(r"[-+]+([A-Za-z][\w.\-]*)")
# Names are tried from their beginning alone, so that no long word is gone through again and again.
_ASSIGNED = re.compile(
    r"""(?<![\w.\-])(?P<option>[-+]{1,2})?(?P<name>[A-Za-z_][\w.\-]*)["']?"""
    r"""(?:\s*[=:]\s*|(?(option)(?:\s+(?!--))|(?!)))"""
)
_SCHEMES = r"(?:(?:bearer|basic|token|digest|negotiate|apikey)\s+)?"
_VALUE = re.compile(
    _SCHEMES + r"""(?:"(?:[^"\\]|\\.){0,4096}"|'[^']{0,4096}'|\\?["']?[^\s"'&,;}\])]+)""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=\-]{8,}", re.IGNORECASE)
_USER_AT = re.compile(
    r"""(?P<scheme>\b[A-Za-z][A-Za-z0-9+.\-]{0,30}://)"""
    r"""(?:(?P<user>[^\s/:@"'?#]*):(?:[^\s/"']{0,512}|(?!\d+[/?#])[^\s"']{0,512}?)"""
    r"""|(?P<alone>[^\s/:@"'?#]+))@"""
)
_BARE_USER_AT = re.compile(r"(?<![\w/@.\-:])([\w.\-]+):(?!\d+@)[^\s:@/\"']+@(?!sha\d+:)(?=[\w\[])")
# Whoever knows such an address may post there.
_WEBHOOK = re.compile(
    r"(\bhooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/"
    r"|\bdiscord(?:app)?\.com/api/(?:v\d{1,3}/)?webhooks/)"
    r"""[^\s"'?#&;,)\]}<>]+""",
    re.IGNORECASE,
)
_PEM = re.compile(r"-----BEGIN[A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END|\Z)", re.DOTALL)
_QUOTES = "\\\"'"
_JUDGED = 256  # characters of a value by which it is judged
_SHORT_OPTION = 5  # characters of an option such as `-fp16`
_USER_OPTIONS = ("-u", "--user", "--proxy-user")


def mask_command(words: Iterable[str]) -> list[str]:
    """A command line that can be recorded or shown: its words, with credentials masked."""
    found: list[str] = []
    option = ""
    for word in words:
        name = _OPTION.fullmatch(word)
        if option and _is_value(option, word):
            found.append(MASK)
        elif name is None and found and found[-1] in _USER_OPTIONS:
            found.append(_mask_user(word))
        else:
            found.append(mask_text(word))
        option = name[1] if name else ""
    return found


def mask_variable(name: str, value: str) -> str:
    """The value of a variable (or of any other name) that can be recorded or shown."""
    return MASK if _is_secret(name, value) else mask_text(value)


def mask_text(text: str) -> str:
    """Text of any kind, such as a word of a command line, an address or an error message."""
    if "=" in text and (" " not in text or text.startswith("-")):
        name, _, value = text.partition("=")
        if _OPTION.fullmatch(f"-{name.lstrip('-+')}") and _is_secret(name, value):
            return f"{name}={MASK}"  # the whole of it, whatever characters it holds
    if "@" in text:
        text = _USER_AT.sub(_mask_address, text)
        text = _BARE_USER_AT.sub(rf"\1:{MASK}@", text)
    if "/" in text:
        text = _WEBHOOK.sub(rf"\g<1>{MASK}", text)
    if "=" in text or ":" in text or "-" in text:
        text = _mask_assignments(text)
    if "earer" in text or "EARER" in text:
        text = _BEARER.sub(rf"\g<1>{MASK}", text)
    if "PRIVATE KEY-----" in text:
        text = _PEM.sub(MASK, text)
    return _RUN.sub(_mask_token, text)


def _is_value(option: str, word: str) -> bool:
    """Whether a word is the secret of the option before it."""
    parts = _words(option)
    is_switch = bool(parts) and parts[0] in _SWITCHES
    if is_switch or (word.startswith("-") and not _is_dashed_value(word)):
        return _is_secret(option, word) and _is_random(word)
    return _is_secret(option, word)


def _is_dashed_value(word: str) -> bool:
    """`-abc123`: long for an option of one dash, and letters mixed with digits; not `-fp16`."""
    judged = word[1:_JUDGED]
    is_mixed = any(c.isdigit() for c in judged) and any(c.isalpha() for c in judged)
    return len(judged) > _SHORT_OPTION and judged[0] != "-" and is_mixed


def _is_secret(name: str, value: str) -> bool:
    """Whether a name says that its value is a secret, and the value may be one."""
    if not value or value == MASK:
        return False
    parts = _words(name)
    if not parts or parts[-1] in _ABOUT:
        return False
    if not _SECRET.isdisjoint(parts) or parts[-1].endswith(_SECRET_ENDS):
        return value.lower() not in _PLAIN
    last, before = parts[-1], set(parts[:-1])
    if last in _LIKELY or (last == "key" and not before.isdisjoint(_KEY_OF)):
        of_model = last in ("token", "pass") and not before.isdisjoint(_OF_MODELS)
        return not (of_model or _is_plain(value))
    return last in _POSSIBLE and _is_random(value)


@lru_cache(maxsize=512)
def _words(name: str) -> tuple[str, ...]:
    """The words of a name: `WANDB_API_KEY`, `--apiKey` and `logger.api-key` end in the same two."""
    return tuple(part.lower() for part in _PARTS.findall(name[-200:]))


def _is_plain(value: str) -> bool:
    """A number, a switch, a path, a special token such as <pad>: no secret."""
    return (
        value.lower() in _PLAIN
        or _NUMBER.fullmatch(value) is not None
        or value.startswith(("/", "./", "../", "~", "<", "[", "$", "{", "%"))
    )


def _is_random(value: str) -> bool:
    """Whether a long part of it mixes letters and digits, as no word or number does."""
    return any(not run.isalpha() and not run.isdigit() for run in _RANDOM.findall(value))


def _mask_assignments(text: str) -> str:
    """`NAME=VALUE`, `NAME: VALUE`, `"NAME": "VALUE"` and `--NAME VALUE` wherever they stand."""
    kept: list[str] = []
    at = 0
    for found in _ASSIGNED.finditer(text):
        if found.start() < at:
            continue  # within a value that is masked
        start = found.end()
        value = _VALUE.match(text, start, start + _JUDGED)
        if value is None or value[0].startswith("//"):
            continue
        is_word = found["option"] and text[start - 1].isspace()
        if (_is_value if is_word else _is_secret)(found["name"], value[0].strip(_QUOTES)):
            value = _VALUE.match(text, start) or value  # now all of it
            whole = value[0]
            quotes = whole[: len(whole) - len(whole.lstrip(_QUOTES))]
            closing = quotes if quotes and whole.endswith(quotes) else ""
            kept += [text[at:start], quotes, MASK, closing]
            at = value.end()
    return "".join([*kept, text[at:]])


def _mask_address(found: re.Match[str]) -> str:
    """`scheme://user:password@` without the password; a user alone only where it is a token."""
    if found["alone"] is None:
        return f"{found['scheme']}{found['user']}:{MASK}@"
    alone = found["alone"]
    is_token = _is_random(alone) or _RUN.sub(_mask_token, alone) != alone
    return f"{found['scheme']}{MASK if is_token else alone}@"


def _mask_user(word: str) -> str:
    """`name:password` as curl takes it; `uid:gid` is none."""
    name, colon, value = word.partition(":")
    return f"{name}:{MASK}" if colon and value and not value.isdigit() else mask_text(word)


def _mask_token(found: re.Match[str]) -> str:
    run = found[0]
    for prefix, least in _TOKENS.items():
        if run.startswith(prefix):
            rest = run[len(prefix) :]
            return MASK if len(rest) >= least and (prefix != "eyJ" or "." in rest) else run
    return MASK if run.startswith("sk-") and _RANDOM.search(run) else run

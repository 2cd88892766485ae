"""What a template may see of the environment that the service was started in.

An allow-list, not a block-list: a variable that nobody thought of stays out.
The service itself runs scrubbed; this is the second fence, for a service that
somebody starts by hand in a shell full of credentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Variables that tell where things are and how people are spoken to; none holds a secret.
ALLOWED = frozenset(
    {
        "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL",
        "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TZ", "USER",
    }
)  # fmt: skip
ALLOWED_PREFIXES = ("LC_",)
#: Where the network needs a proxy, `pip install` in a notebook does too; in either case of
#: letters.  Only without a password in them.
PROXIES = frozenset({"ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"})
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def scrubbed(source: Mapping[str, str]) -> dict[str, str]:
    """The allowed part of `source`, with a PATH in any case."""
    kept = {
        name: value
        for name, value in source.items()
        if name in ALLOWED
        or name.startswith(ALLOWED_PREFIXES)
        or (name.upper() in PROXIES and "@" not in value)
    }
    kept.setdefault("PATH", DEFAULT_PATH)
    return kept


def template_environment(
    source: Mapping[str, str], prefix: Path, image: Mapping[str, str]
) -> dict[str, str]:
    """The environment of an image's template.

    `prefix/bin` comes first on PATH, so that `!pip` in a cell is the image's own.
    The image's variables (its owner wrote them, LM 9.1) win over everything.
    """
    environment = scrubbed(source)
    environment["PATH"] = f"{prefix / 'bin'}:{environment['PATH']}"
    return {**environment, **image}

"""TLS for the server's port: a context made from files, which are read again when they change.

Invariants: a renewed certificate, and other authorities of the clients' certificates, hold for new connections without
a restart, old ones go on; files that cannot be read, or do not belong together, leave everything as it was, and the log
says so once.
Knows nothing of HTTP: where probes need no certificate, the handshake asks for one and wants none.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from stoker_runtime.config import ServerConfig
from stoker_runtime.errors import ConfigError

CHECK_SECONDS = 5.0
VERIFY = {0: ssl.CERT_NONE, 1: ssl.CERT_OPTIONAL, 2: ssl.CERT_REQUIRED}

log = logging.getLogger(__name__)


class FreshContext(ssl.SSLContext):
    """Gives each new connection what the newest files make: a context itself forgets no authority that it has read."""

    newest: ssl.SSLContext

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """One connection, as asyncio makes it."""
        return self.newest.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


def tls_context(config: ServerConfig) -> FreshContext | None:
    """The context that the configuration asks for, if it does. Raises ConfigError naming the file."""
    if not config.ssl_certfile:
        return None
    context = FreshContext(ssl.PROTOCOL_TLS_SERVER)
    context.newest = _made(config)
    return context


def _made(config: ServerConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_chain(context, config)
    context.verify_mode = VERIFY[1 if config.ssl_probes_without_cert else config.ssl_cert_reqs]
    if config.ssl_ca_certs:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {error}.", param="ssl-ca-certs") from error
    if config.ssl_ciphers:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError as error:
            raise ConfigError(f"--ssl-ciphers {config.ssl_ciphers}: {error}.", param="ssl-ciphers") from error
    return context


async def keep_fresh(context: FreshContext, config: ServerConfig, seconds: float = CHECK_SECONDS) -> None:
    """Load the files again whenever one changes, for ever."""
    seen = _stamps(config)
    while True:
        await asyncio.sleep(seconds)
        found = _stamps(config)
        if found == seen:
            continue
        seen = found
        try:
            context.newest = _made(config)
        except ConfigError as error:
            log.error("%s What was loaded stays.", error.message)
        else:
            log.info("loaded the certificate %s and what belongs to it, which changed", config.ssl_certfile)


def _load_chain(context: ssl.SSLContext, config: ServerConfig) -> None:
    def no_password() -> bytes:
        # Without this OpenSSL would ask on the terminal, and the server hang.
        raise ConfigError("The TLS key is encrypted; give one that is not.", param="ssl-keyfile")

    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, no_password)
    except (OSError, ssl.SSLError) as error:
        pair = f"{config.ssl_certfile} and {config.ssl_keyfile}" if config.ssl_keyfile else config.ssl_certfile
        raise ConfigError(f"The TLS certificate in {pair} cannot be loaded: {error}.", param="ssl-certfile") from error


def _stamps(config: ServerConfig) -> list[tuple[int, int] | None]:
    found: list[tuple[int, int] | None] = []
    for name in (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs):
        try:
            status = Path(name).stat() if name else None
        except OSError:
            status = None
        found.append((status.st_ino, status.st_mtime_ns) if status else None)
    return found

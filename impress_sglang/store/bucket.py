"""Requests to an object store, below one prefix of one bucket.

`obstore` retries with back-off, within the patience of the server's drive. What fails after that is
an `OSError`, and then all requests fail at once for a while, but for one that asks whether the
store answers again: who asks for a stored prefix must not wait for each of its segments.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import importlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ConfigError
from impress_sglang.store.health import FIRST_PAUSE_S, LONGEST_PAUSE_S

logger = logging.getLogger(__name__)

_RETRIES = 4
_PUT_SECONDS = 600
# Names in one answer to a request for a list; S3 gives no more.
_PAGE = 1000


class ObjectMeta(NamedTuple):
    """What a list says of an object: `modified` is by the clock of the store."""

    name: str
    size: int
    modified: datetime.datetime


class Bucket:
    """The objects below a prefix; any thread uses it. Methods wait for the network, and raise

    OSError: the store does not answer, or refuses; `FileNotFoundError`: there is no such object.
    """

    def __init__(self, store: Any, patient: Any, url: str) -> None:
        """`store`, `patient`: of `obstore`, for reads and for writes; `url`: for messages."""
        self._obstore = importlib.import_module("obstore")
        self._exists = importlib.import_module("obstore.exceptions").AlreadyExistsError
        self._store, self._patient, self.url = store, patient, url
        self._lock = threading.Lock()
        self._pause = FIRST_PAUSE_S
        self._failed_at = self._rests_until = 0.0
        self.requests = self.failures = 0

    @property
    def answers(self) -> bool:
        """Whether the last read was answered."""
        return not self._failed_at

    def check(self) -> None:
        """Raise `OSError` while requests would fail at once."""
        if time.monotonic() < self._rests_until:
            raise OSError(errno.EAGAIN, f"{self.url} has failed, and is left alone for a while")

    def list(
        self, prefix: str, known: Mapping[str, ObjectMeta] | None = None
    ) -> dict[str, ObjectMeta]:
        """All objects in a folder that have bytes, by name; asks even while others would fail.

        Those of `known` that are as they were come back themselves: a hundred thousand new Python
        objects would make its collector stop the process.
        """
        found = dict[str, ObjectMeta]()
        with self._asking(reading=True):
            for page in self._obstore.list(self._store, prefix, chunk_size=_PAGE):
                for own in page:
                    name, size, modified = own["path"], own["size"], own["last_modified"]
                    meta = (known or {}).get(name)
                    if meta is None or meta.size != size or meta.modified != modified:
                        meta = ObjectMeta(name, size, modified)
                    if size:
                        found[name] = meta
        return found

    def range(self, name: str, start: int, length: int) -> memoryview:
        """Bytes of an object; fewer if it ends before."""
        self.check()
        with self._asking(reading=True):
            found = self._obstore.get_range(self._store, name, start=start, length=length)
            return memoryview(found)

    def begin(self, name: str, length: int) -> tuple[bytes, dict[str, str]]:
        """The first bytes of an object, and its attributes."""
        self.check()
        with self._asking(reading=True):
            options = {"range": (0, length)}
            found = self._obstore.get(self._store, name, options=options)
            return bytes(found.bytes()), dict(found.attributes)

    def put(
        self, name: str, content: bytes | bytearray, attributes: Mapping[str, str] | None = None
    ) -> bool:
        """Put an object; False if there is one of this name, which stays."""
        with self._asking():
            try:
                self._obstore.put(
                    self._patient,
                    name,
                    content,
                    mode="create",
                    use_multipart=False,
                    attributes=dict(attributes or {}),
                )
            except self._exists:
                return False
            return True

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, of which some may be gone, by a thousand in a request."""
        if names:
            with self._asking():
                self._obstore.delete(self._patient, names)

    @contextlib.contextmanager
    def _asking(self, *, reading: bool = False) -> Iterator[None]:
        self.requests += 1
        try:
            yield
        except FileNotFoundError:
            self._note(None, reading)
            raise
        except Exception as error:
            # Among others what `obstore` raises, whose classes are its own.
            self.failures += 1
            self._note(error, reading)
            raise OSError(errno.EIO, _first_line(error)) from error
        self._note(None, reading)

    def _note(self, error: Exception | None, reading: bool) -> None:
        # Who may only read has no right to write, which says nothing of reads.
        if not reading:
            return
        with self._lock:
            now, failed_at = time.monotonic(), self._failed_at
            if error is None:
                if failed_at:
                    logger.warning("%s answers again after %.1f s", self.url, now - failed_at)
                self._failed_at = self._rests_until = 0.0
                self._pause = FIRST_PAUSE_S
                return
            self._failed_at = failed_at or now
            if now >= self._rests_until:
                self._rests_until = now + self._pause
                self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        if not failed_at:
            logger.warning(
                "%s fails: %s; what only it has is computed until it answers again",
                self.url,
                _first_line(error),
            )


def open_bucket(config: ImpressConfig) -> Bucket | None:
    """The bucket and prefix that `--impress-store` names, if it does; nothing is asked of it yet.

    Credentials and endpoint are those of the environment, as `obstore` takes them. Reads fail after
    `--impress-io-timeout`.

    Raises:
        ConfigError: `obstore` is missing, or refuses the URL.
    """
    if not (url := config.store):
        return None
    try:
        stores = importlib.import_module("obstore.store")
    except ImportError as error:
        raise ConfigError(
            "--impress-store needs obstore: pip install 'impress-sglang[s3]'"
        ) from error
    seconds = datetime.timedelta(seconds=config.io_timeout / 2)
    backoff = {
        "init_backoff": datetime.timedelta(milliseconds=100),
        "max_backoff": seconds / 4,
        "base": 2,
    }
    retry = {"max_retries": _RETRIES, "retry_timeout": seconds, "backoff": backoff}
    # Only an endpoint that the operator names has no TLS.
    client = {"connect_timeout": seconds, "allow_http": True}
    try:
        # A whole segment takes longer than a range of it.
        found = [
            stores.from_url(url, client_options={**client, "timeout": own}, retry_config=retry)
            for own in (seconds, datetime.timedelta(seconds=_PUT_SECONDS))
        ]
    except Exception as error:
        raise ConfigError(f"--impress-store {url}: {_first_line(error)}") from error
    return Bucket(found[0], found[1], url)


def _first_line(error: BaseException) -> str:
    return f"{error}".strip().split("\n", 1)[0]

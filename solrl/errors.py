"""Every error solrl raises on purpose.

SolrlError
├── ConfigError        a setting is wrong                                  exit 2
├── InputError         a request or a file is wrong (HTTP 422, gRPC INVALID_ARGUMENT)
│   ├── VersionError   an adapter version that is not held (HTTP 409, FAILED_PRECONDITION)
│   └── AdapterError   an adapter that cannot be bound; the old one keeps serving (HTTP 409)
├── BusyError          queue full, run locked, stack taken (HTTP 429 / 409)
└── UnavailableError   a neighbour cannot be reached in time (HTTP 503, UNAVAILABLE); retry

One message says what failed, the value seen, the value allowed and what to do.
"""

from __future__ import annotations


class SolrlError(Exception):
    """Base of all; its text is meant for a person."""


class ConfigError(SolrlError):
    """A setting is wrong; nothing has been started."""


class InputError(SolrlError):
    """A request or file is wrong; repeating it cannot help."""


class VersionError(InputError):
    """The policy version asked for is not held; the message names those that are."""


class AdapterError(InputError):
    """An adapter could not be bound whole; the version before keeps serving."""


class BusyError(SolrlError):
    """Somebody else holds the thing, or a bounded queue is full."""


class UnavailableError(SolrlError):
    """A neighbour did not answer in time; the call may be repeated."""

